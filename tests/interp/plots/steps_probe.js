// What a reader does to a picture of steps, and what it answers; run by test_stepped.py.
addEventListener("message", () => {
  const nodes = [...document.querySelectorAll(".steps span")], tip = () => document.getElementById("tip").innerText;
  const colours = () => nodes.map(node => node.style.background);
  const point = node => {
    const box = node.getBoundingClientRect();
    node.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 2, clientY: box.top + 2, bubbles: true }));
    return tip();
  };
  const seen = { text: nodes.map(node => node.textContent), first: colours(), told: point(nodes[2]) };
  seen.legend = document.querySelector(".legend").innerText;
  nodes[0].click();
  seen.chosen = colours();
  seen.marked = nodes.map(node => node.className);
  seen.of = point(nodes[3]);
  seen.itself = point(nodes[0]);
  nodes[0].click();
  seen.again = colours();
  const strip = document.querySelector(".steps");
  for (const key of ["ArrowRight", "Enter"]) strip.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  seen.keys = nodes.map(node => node.className);
  seen.grids = document.querySelectorAll(".map").length;
  parent.postMessage(JSON.stringify(seen), "*");
});
