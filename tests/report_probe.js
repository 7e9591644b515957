// What a reader does to the report's page, and what it answers; run by test_report.py.
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("securitypolicyviolation", event => errors.push("blocked " + event.blockedURI));
console.error = console.warn = (...what) => errors.push(what.join(" "));
addEventListener("load", () => {
  const spot = (node, x, y) => {
    const box = node.getBoundingClientRect();
    return { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true };
  };
  const tip = () => document.getElementById("tip").innerText;
  const seen = {};
  const loss = document.querySelector("#loss [data-pos='3']");
  loss.dispatchEvent(new PointerEvent("pointerover", spot(loss, .5, .5)));
  seen.loss = tip();
  const buttons = document.querySelectorAll("#heads button");
  seen.heads = buttons.length;
  buttons[4].click();
  seen.title = document.getElementById("pattern-title").innerText;
  seen.pressed = document.querySelectorAll("#heads [aria-pressed=true]").length;
  const map = document.querySelector("#pattern canvas");
  map.dispatchEvent(new PointerEvent("pointermove", spot(map, 2.5 / 29, 7.5 / 29)));
  seen.attention = tip();
  seen.reads = document.getElementById("reads-title").innerText;
  map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp" }));
  seen.above = tip();
  const cell = document.querySelector("#lens tbody tr:nth-child(2) td:nth-of-type(6)");
  cell.dispatchEvent(new PointerEvent("pointerover", spot(cell, .5, .5)));
  seen.lens = tip();
  const patch = document.querySelector("#patch-mlp_out canvas");
  patch.dispatchEvent(new PointerEvent("pointermove", spot(patch, 5.5 / 29, .75)));
  seen.patch = tip();
  const paint = (node, x, y) =>
    [...node.getContext("2d").getImageData(x * node.width, y * node.height, 1, 1).data].slice(0, 3);
  seen.red = ["rows", "columns"].map(side =>
    [...document.querySelectorAll(`#patch-mlp_out .${side} span`)].flatMap((label, i) => label.className ? i : []));
  seen.paint = [paint(patch, 5.5 / 29, .25), paint(patch, 5.5 / 29, .75), paint(map, 2.5 / 29, 7.5 / 29)];
  const heads = document.querySelector("#patch-z canvas");
  heads.dispatchEvent(new PointerEvent("pointermove", spot(heads, .5, .75)));
  seen.z = tip();
  heads.click();
  seen.chosen = document.getElementById("pattern-title").innerText;
  seen.maps = document.querySelectorAll(".map").length;
  seen.sideways = document.documentElement.scrollWidth > innerWidth;
  seen.errors = errors;
  document.body.setAttribute("data-seen", JSON.stringify(seen));
});
