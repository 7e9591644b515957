// What a reader does to a page of pictures, and what it answers; run by test_plots.py.
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("securitypolicyviolation", event => errors.push(`blocked ${event.violatedDirective}`));
// While a page draws it may have no layout, so what it measures then is noted.
const measured = [];
let drawing = true;
addEventListener("DOMContentLoaded", () => { drawing = false; });
for (const owner of [HTMLElement.prototype, Element.prototype, window])
  for (const [name, was] of Object.entries(Object.getOwnPropertyDescriptors(owner))) {
    const note = kind => function (...given) { if (drawing) measured.push(name); return was[kind].apply(this, given); };
    if (/^(offset|client|scroll|inner)(Left|Top|Width|Height)$/.test(name)) Object.defineProperty(owner, name, { ...was, get: note("get"), set: note("set") });
    if (name === "getBoundingClientRect") owner[name] = note("value");
  }
addEventListener("message", () => {
  const part = n => document.querySelector(`[data-part="${n}"]`);
  const tip = () => document.getElementById("tip").innerText;
  const point = (node, x, y) => {
    const box = node.getBoundingClientRect();
    node.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true }));
    return tip();
  };
  const press = (node, key) => { node.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); return tip(); };
  const map = n => part(n).querySelector(".box canvas");
  const seen = { width: innerWidth, scroll: document.documentElement.scrollWidth };
  // The cell that the middle of each text is over, by the screen.
  const centre = ({ left, top, width, height }) => [left + width / 2, top + height / 2];
  const places = (n, texts = ".cells span") => {
    const { left, top, width, height } = map(n).getBoundingClientRect();
    return [...part(n).querySelectorAll(texts)].map(span => {
      const [x, y] = centre(span.getBoundingClientRect());
      return [(y - top) / height * map(n).height - .5, (x - left) / width * map(n).width - .5, span.textContent];
    });
  };
  seen.measured = measured;
  seen.places = [places(2), places(3)];
  // How far the last cell or token is from the right end and the bottom of what its frame shows.
  const ends = (frame, node) => {
    const [outer, inner] = [frame, node].map(each => each.getBoundingClientRect());
    return [outer.left + frame.clientLeft + frame.clientWidth - inner.right, outer.top + frame.clientTop + frame.clientHeight - inner.bottom];
  };
  const frames = [part(0).querySelector(".box"), part(2).querySelector(".box"), part(1).querySelector(".text")];
  for (const frame of frames) Object.assign(frame.style, { maxHeight: "90px", width: "150px" });
  const last = [map(0), map(2), [...frames[2].querySelectorAll("span")].at(-1)];
  seen.ends = frames.map((frame, n) => ends(frame, last[n]));
  for (const frame of frames) Object.assign(frame.style, { maxHeight: "", width: "" });
  seen.plots = [4, 5].map(n => part(n).querySelector("svg").getBoundingClientRect().width);
  part(0).querySelectorAll(".facets button")[4].click();
  seen.pressed = [...part(0).querySelectorAll(".facets [aria-pressed=true]")].map(node => node.title);
  seen.weight = point(map(0), 2.5 / 9, 7.5 / 9);
  seen.strip = part(0).querySelectorAll(".text .here").length;
  seen.pixel = [...map(0).getContext("2d").getImageData(2, 7, 1, 1).data].slice(0, 3);
  seen.up = press(map(0), "ArrowUp");
  part(0).querySelector(".large .swap").click();
  seen.swapped = point(map(0), 7.5 / 9, 2.5 / 9);
  seen.corner = part(0).querySelector(".corner").innerText;
  seen.tokens = [...part(1).querySelectorAll("span")].map(node => node.textContent).filter(text => text);
  seen.value = point(part(1).querySelectorAll(".text span")[1], .5, .5);
  seen.lens = point(map(2), 8.5 / 9, .5 / 5);
  seen.cursor = places(2, ".cursor");
  seen.heat = point(map(3), 1.5 / 3, 1.5 / 2);
  seen.bar = press(part(4).querySelector("svg"), "ArrowDown");
  seen.line = press(part(5).querySelector("svg"), "ArrowLeft");
  const slider = part(6).querySelector("input"), edges = () => part(6).querySelectorAll("svg > path").length;
  seen.edges = [edges()];
  slider.value = 3;
  slider.dispatchEvent(new Event("input"));
  seen.edges.push(edges());
  seen.faithful = part(6).querySelector("output").textContent;
  seen.edge = press(part(6).querySelector("svg"), "ArrowRight");
  seen.foreign = document.querySelectorAll("img, b:not(.tip b), iframe").length;
  seen.hacked = window.hacked ?? null;
  seen.errors = errors;
  parent.postMessage(JSON.stringify(seen), "*");
});
