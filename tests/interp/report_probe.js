// What a reader does to the report's page, and what it answers; run by test_report.py.
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("securitypolicyviolation", event => errors.push(`blocked ${event.violatedDirective}`));
addEventListener("message", () => {
  const seen = { maps: document.querySelectorAll(".map").length };
  const map = title => {
    let node = [...document.querySelectorAll("h2")].find(heading => heading.innerText.endsWith(title));
    while (node.tagName !== "FIGURE") node = node.nextElementSibling;
    return node.querySelector("canvas[aria-label]");
  };
  const point = (node, x, y) => {
    const box = node.getBoundingClientRect();
    node.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true }));
    return document.getElementById("tip").innerText;
  };
  seen.patch = point(map("What the MLP adds"), 5.5 / 29, .75);
  seen.changed = ["rows", "columns"].map(side =>
    [...map("What the MLP adds").parentElement.querySelectorAll(`.${side} span`)].flatMap((label, i) => label.className.includes("changed") ? i : []));
  point(map("at all positions"), .5, .75);
  map("at all positions").click();
  seen.chosen = map("Attention patterns").closest("figure").querySelector(".facet").innerText;
  seen.attention = point(map("Attention patterns"), 2.5 / 29, 7.5 / 29);
  seen.errors = errors;
  parent.postMessage(JSON.stringify(seen), "*");
});
