// What a reader does to the report's page, and what it answers; run by test_report.py.
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("securitypolicyviolation", event => errors.push(`blocked ${event.violatedDirective}`));
addEventListener("message", () => {
  const seen = { settings: document.querySelector("details").open, maps: document.querySelectorAll(".map").length };
  const map = title => document.querySelector(`canvas[aria-label^="${title}"]`);
  const point = (node, x, y) => {
    const box = node.getBoundingClientRect();
    node.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true }));
    return document.getElementById("tip").innerText;
  };
  seen.patch = point(map("mlp_out"), 5.5 / 29, .75);
  seen.changed = ["rows", "columns"].map(side =>
    [...map("mlp_out").parentElement.querySelectorAll(`.${side} span`)].flatMap((label, i) => label.className.includes("changed") ? i : []));
  point(map("z,"), .5, .75);
  map("z,").click();
  seen.chosen = map("attention").closest("figure").querySelector(".facet").innerText;
  seen.attention = point(map("attention"), 2.5 / 29, 7.5 / 29);
  seen.errors = errors;
  parent.postMessage(JSON.stringify(seen), "*");
});
