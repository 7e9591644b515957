// Draws the parts of a page from the numbers in its element `data`. A part is a grid, text, steps, bars, a histogram, lines, a network or an attribution graph.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const make = (tag, name = "", text = "") => Object.assign(document.createElement(tag), { className: name, textContent: text });
const shape = (tag, attributes, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
};
const range = count => [...Array(count).keys()];
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const told = value => Number.isNaN(value) ? "not known" : `${+value.toPrecision(5)}`.replace("-", "−");
const short = (name, most = 14) => [...name].length > most ? `${[...name].slice(0, most - 1).join("")}…` : name;
const named = (axis, i) => `${axis.name} ${axis.labels[i]}${axis.words?.[i] ? ` “${axis.words[i]}”` : ""}`;
const label = (axis, i) => axis.words?.[i] || (axis.words ? `[${axis.labels[i]}]` : axis.labels[i]);

// Numbers are little-endian typed arrays in base64. Of 8-bit ones 255 is NaN.
function numbers({ type, base64, low, step }) {
  const bytes = Uint8Array.from(atob(base64), sign => sign.charCodeAt(0));
  if (type === "u1") return Float64Array.from(bytes, byte => byte === 255 ? NaN : low + step * byte);
  return new { f4: Float32Array, f8: Float64Array }[type](bytes.buffer);
}

const tip = document.body.appendChild(make("div", "tip"));
Object.assign(tip, { id: "tip", hidden: true, role: "status" });
function tell(x, y, title, rows = []) {
  const table = make("table");
  for (const cells of rows) {
    const row = table.insertRow();
    for (const cell of cells) row.insertCell().textContent = cell;
  }
  tip.replaceChildren(make("b", "", title), table);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 18 + width > innerWidth ? x - width - 12 : x + 18;
  const top = y + 18 + height > innerHeight ? y - height - 12 : y + 18;
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}
const hush = () => { tip.hidden = true; };
addEventListener("keydown", event => { if (event.key === "Escape") hush(); });

// Colours are declared once, in the first two rules of the style sheet: from paper at 0 towards `more` above and `less` below.
const [light, dark] = document.getElementById("style").sheet.cssRules, isDark = matchMedia(dark.conditionText);
let colours;
function readColours() {
  const { style } = isDark.matches ? dark.cssRules[0] : light;
  colours = Object.fromEntries(["paper", "more", "less", "unknown"].map(name =>
    [name, style.getPropertyValue(`--${name}`).trim().split(" ").map(Number)]));
}
function paint(value, limit) {
  if (Number.isNaN(value)) return colours.unknown;
  const to = value < 0 ? colours.less : colours.more, share = Math.min(1, Math.abs(value) / limit);
  // In the dark, weak values would be as dark as none.
  return colours.paper.map((from, i) => Math.round(from + (to[i] - from) * (isDark.matches ? share ** 0.6 : share)));
}
const css = rgb => `rgb(${rgb.join(" ")})`;
const onto = ([red, green, blue]) => 0.3 * red + 0.6 * green + 0.1 * blue < 140 ? "#fff" : "#10131a";

function legend({ limit, signed, unit }) {
  const line = make("p", "legend"), end = told(limit), steps = range(9).map(i => i / 8);
  const ramp = values => { const ramp = make("i"); ramp.style.background = `linear-gradient(90deg, ${values.map(x => css(paint(x, 1))).join()})`; return ramp; };
  if (signed) line.append(make("span", "", `−${end}`), ramp(steps.map(x => x - 1)));
  line.append(make("span", "", "0"), ramp(steps), make("span", "", end), make("em", "", unit));
  return line;
}

// One pixel a cell, to be stretched.
function bitmap(rows, columns, rgb) {
  const image = Object.assign(make("canvas"), { width: columns, height: rows });
  const pen = image.getContext("2d"), pixels = pen.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const [red, green, blue, alpha = 255] = rgb(Math.floor(i / columns), i % columns);
    pixels.data.set([red, green, blue, alpha], 4 * i);
  }
  pen.putImageData(pixels, 0, 0);
  return image;
}

// A small picture of a table. A pixel shows the largest of the values it stands for: a mean would hide thin stripes.
function thumbnail(rows, columns, value, limit) {
  const step = Math.ceil(Math.max(rows, columns) / 48);
  const largest = (r, c) => {
    let most = NaN;
    for (let y = r * step; y < Math.min(rows, (r + 1) * step); y++)
      for (let x = c * step; x < Math.min(columns, (c + 1) * step); x++)
        if (!(Math.abs(value(y, x)) <= Math.abs(most))) most = value(y, x);
    return most;
  };
  return bitmap(Math.ceil(rows / step), Math.ceil(columns / step), (r, c) => paint(largest(r, c), limit));
}

function edgeLabels(axis, side, size, marked = []) {
  const line = make("div", `${side} ${axis.words ? "mono" : ""}`);
  const texts = range(axis.labels.length).map(i => short(label(axis, i)));
  const upright = side === "columns" && Math.max(...texts.map(text => [...text].length)) * 8 > size;
  texts.forEach((text, i) => {
    const span = make("span", `${marked.includes(i) ? "changed" : ""} ${upright && text.length > 1 ? "upright" : ""}`, text);
    span.style[side === "columns" ? "width" : "height"] = `${size}px`;
    line.append(span);
  });
  line.style.fontSize = `${clamp(size, 8, 12)}px`;
  return line;
}

function grid(part, box) {
  const values = numbers(part.values), [facets, n, m] = part.values.shape, { limit } = part;
  const more = Object.entries(part.more ?? {}).map(([name, packed]) => [name, numbers(packed)]);
  let facet = part.start ?? 0, swapped = false, here = [part.from_end ? n - 1 : 0, part.from_end ? m - 1 : 0];
  const at = (r, c, f = facet) => (f * n + (swapped ? c : r)) * m + (swapped ? r : c);
  const axes = () => swapped ? [part.columns, part.rows] : [part.rows, part.columns];
  const buttons = make("div", "facets"), title = make("p", "facet"), frame = make("div", `box ${part.from_end ? part.square ? "right bottom" : "right" : ""}`), strip = make("div", "text");
  const swap = make("button", "swap", "swap queries and keys"), sort = make("button", "swap", "sort by score"), key = make("div"), beside = make("div", "beside"), large = make("div", "large");
  const scores = part.scores && numbers(part.scores), scored = f => scores ? [make("span", "note", Number.isNaN(scores[f]) ? "" : scores[f].toFixed(2))] : [];
  let sorted = false;

  function visit(row, column, x, y) {
    here = [row, column];
    const [rows, columns] = axes(), cursor = frame.querySelector(".cursor"), i = at(row, column);
    cursor.hidden = false;
    cursor.style.gridArea = `${row + 1} / ${column + 1} / ${row + 2} / ${column + 2}`;
    drawStrip();
    const spot = cursor.getBoundingClientRect();
    tell(x ?? spot.right, y ?? spot.bottom, `${told(values[i])} ${part.unit}`, [
      ...(facets > 1 ? [[part.facets[facet], ""]] : []), [named(rows, row), ""], [named(columns, column), ""],
      ...more.map(([name, numbers]) => [name, told(numbers[i])]), ...(part.tips?.[i] ?? [])]);
  }
  function drawStrip() {
    if (!part.strip) return;
    const [rows, columns] = axes();
    strip.replaceChildren(...range(columns.labels.length).map(c => {
      const span = make("span", c === here[0] ? "here" : "", label(columns, c)), colour = paint(values[at(here[0], c)], limit);
      span.style.background = css(colour);
      span.style.color = onto(colour);
      return span;
    }));
    strip.setAttribute("aria-label", `text coloured by what ${named(rows, here[0])} has with each token`);
  }
  function cellTexts(rows, columns) {
    return range(rows * columns).map(i => {
      const [r, c] = [Math.floor(i / columns), i % columns], span = make("span", "", part.cells?.[at(r, c)] ?? told(Math.abs(values[at(r, c)]) < limit / 500 ? 0 : +values[at(r, c)].toPrecision(2)));
      span.style.color = onto(paint(values[at(r, c)], limit));
      return span;
    });
  }
  function draw() {
    const [rows, columns] = axes(), [down, over] = [rows.labels.length, columns.labels.length];
    const written = part.cells || (part.written && over <= 24 && down <= 60), high = clamp(Math.floor(420 / down), written ? 24 : 10, part.under ? 90 : 30);
    // As narrow as the longest text in a cell allows, so that a long row is seen whole.
    const longest = Math.max(0, ...(part.cells ?? []).map(text => [...text].length)), least = part.cells ? clamp(8 * longest + 8, 18, 44) : written ? 52 : 10;
    const wide = part.square ? high : clamp(Math.floor(860 / over), least, 64);
    const map = make("div", "map"), cells = make("div", "cells"), cursor = make("div", "cursor"), overImage = x => [...paint(Math.sign(x) * limit, limit), 220 * Math.min(1, Math.abs(x || 0) / limit)];
    const body = bitmap(down, over, (r, c) => part.under ? overImage(values[at(r, c)]) : paint(values[at(r, c)], limit));
    Object.assign(body, { tabIndex: 0 });
    body.setAttribute("role", "application");
    body.setAttribute("aria-label", `${part.title || "table"}, ${rows.name} by ${columns.name}; arrow keys move from cell to cell`);
    body.style.cssText = `width: ${over * wide}px; height: ${down * high}px`;
    cells.style.cssText = `grid-template: repeat(${down}, ${high}px) / repeat(${over}, ${wide}px)`;
    cells.append(...(written ? cellTexts(down, over) : []), cursor);
    const spotOf = event => {
      const spot = body.getBoundingClientRect();
      return [clamp(Math.floor((event.clientY - spot.top) / high), 0, down - 1), clamp(Math.floor((event.clientX - spot.left) / wide), 0, over - 1)];
    };
    body.onpointermove = body.onpointerdown = event => visit(...spotOf(event), event.clientX, event.clientY);
    body.onpointerleave = body.onblur = () => { cursor.hidden = true; hush(); };
    body.onfocus = () => { if (cursor.hidden) visit(...here); };
    const choose = () => { if (part.link !== undefined) parts[part.link].show(here[0] * m + here[1], true); };
    body.onclick = choose;
    body.onkeydown = event => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Enter") choose();
      if (event.key === "Escape") cursor.hidden = true;
      if (!step) return;
      event.preventDefault();
      visit(clamp(here[0] + step[0], 0, down - 1), clamp(here[1] + step[1], 0, over - 1));
      cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
    };
    cursor.hidden = true;
    map.append(make("div", "corner", `${rows.name} \\ ${columns.name}`), edgeLabels(columns, "columns", wide, part.marked), edgeLabels(rows, "rows", high), body, cells);
    if (part.under) {
      const [tall, broad] = part.under.shape, pixels = numbers(part.under);
      const under = bitmap(tall, broad, (r, c) => [0, 1, 2].map(k => pixels[3 * (r * broad + c) + k]));
      under.style.cssText = body.style.cssText;
      map.insertBefore(under, body);
    }
    frame.replaceChildren(map);
    title.textContent = facets > 1 ? part.facets[facet] : "";
    title.hidden = facets === 1;
    drawStrip();
  }
  function show(to, jump = false) {
    facet = to;
    for (const button of buttons.children) button.setAttribute("aria-pressed", +button.dataset.facet === facet);
    draw();
    if (jump) box.scrollIntoView();
  }
  function redraw() {
    const order = range(facets), across = part.across && !sorted;
    if (sorted) order.sort((f, g) => (scores[g] || 0) - (scores[f] || 0));
    buttons.className = across ? "facets across" : "facets";
    buttons.style.gridTemplateColumns = across ? `repeat(${part.across}, 56px)` : "";
    key.replaceChildren(legend(part));
    if (facets > 1) buttons.replaceChildren(...order.map(f => {
      const button = make("button");
      button.append(thumbnail(n, m, (r, c) => values[(f * n + r) * m + c], limit), make("span", "", part.names?.[f] ?? part.facets[f]), ...scored(f));
      Object.assign(button.dataset, { facet: f });
      button.title = part.facets[f];
      if (part.names) button.setAttribute("aria-label", `${part.names[f]}, ${part.facets[f]}`);
      button.onclick = () => show(f);
      return button;
    }));
    show(facet);
  }
  sort.hidden = !scores;
  sort.setAttribute("aria-pressed", false);
  sort.onclick = () => { sorted = !sorted; sort.setAttribute("aria-pressed", sorted); redraw(); };
  swap.hidden = !part.swap;
  swap.setAttribute("aria-pressed", false);
  swap.onclick = () => { swapped = !swapped; swap.setAttribute("aria-pressed", swapped); draw(); };
  buttons.hidden = facets === 1;
  strip.hidden = !part.strip;
  strip.tabIndex = frame.tabIndex = buttons.tabIndex = -1;
  strip.setAttribute("role", "group");
  large.append(title, frame, swap);
  beside.append(buttons, large);
  box.append(key, sort, beside, strip);
  return { redraw, show };
}

// Spots that tell something under the pointer, and by the arrow keys when their container has the focus.
function spots(container, nodes, tellOf) {
  let now = -1;
  const go = (i, x, y) => {
    nodes[now]?.classList.remove("here");
    now = i;
    nodes[i].classList.add("here");
    const spot = nodes[i].getBoundingClientRect();
    tell(x ?? spot.right, y ?? spot.bottom, ...tellOf(i));
  };
  container.tabIndex = 0;
  container.onkeydown = event => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    go(clamp(now + step, 0, nodes.length - 1));
    nodes[now].scrollIntoView({ block: "nearest" });
  };
  nodes.forEach((node, i) => {
    node.onpointermove = event => go(i, event.clientX, event.clientY);
    node.onpointerleave = () => { node.classList.remove("here"); hush(); };
  });
}

function text(part, box) {
  const values = numbers(part.values), strip = make("div", "text bottom"), flow = strip.appendChild(make("div"));
  strip.setAttribute("role", "application");
  strip.setAttribute("aria-label", `${part.title || "text"}; arrow keys move from token to token`);
  const key = make("div");
  box.append(key, strip);
  const redraw = () => {
    if (part.title) key.replaceChildren(legend(part));
    flow.replaceChildren(...part.tokens.map((token, i) => {
      const span = make("span", part.marked?.includes(i) ? "changed" : "", token), colour = Number.isNaN(values[i]) ? colours.paper : paint(values[i], part.limit);
      span.style.background = css(colour);
      span.style.color = onto(colour);
      return span;
    }));
    spots(strip, [...flow.children], i => [`${told(values[i])} ${part.unit}`, [["token", part.tokens[i]], ["position", part.first + i], ...(part.tips?.[i] ?? [])]]);
  };
  return { redraw };
}

// The steps of a text. With a matrix of effects, a click on a step colours the later steps by its effects on them.
function steps(part, box) {
  const start = numbers(part.start), values = part.values ? numbers(part.values) : null, count = part.words.length;
  const key = make("div"), strip = make("div", "text steps"), flow = strip.appendChild(make("div"));
  let chosen = -1;
  const value = i => chosen < 0 ? start[i] : values[chosen * count + i];
  const nodes = part.words.map((word, i) => {
    const span = make("span", "", word);
    span.onclick = () => choose(i);
    return span;
  });
  strip.setAttribute("role", "application");
  strip.setAttribute("aria-label", `${part.title}; arrow keys move from step to step${values ? ", Enter shows the effects of a step" : ""}`);
  flow.replaceChildren(...nodes);
  box.append(key, strip);
  const redraw = () => {
    const row = values ? [...values.slice(chosen * count, (chosen + 1) * count)].filter(Number.isFinite) : [];
    const limit = chosen < 0 ? part.limit : Math.max(...row.map(Math.abs), 0) || 1;
    key.replaceChildren(legend({ ...part, limit }));
    nodes.forEach((span, i) => {
      const colour = Number.isNaN(value(i)) ? colours.paper : paint(value(i), limit);
      Object.assign(span.style, { background: css(colour), color: onto(colour) });
      span.classList.toggle("changed", i === chosen);
    });
  };
  function choose(i) {
    if (!values) return;
    chosen = chosen === i ? -1 : i;
    redraw();
  }
  const of = () => chosen < 0 ? "" : ` of step ${part.first + chosen}`;
  spots(strip, nodes, i => [Number.isNaN(value(i)) ? `step ${part.first + i}` : `${told(value(i))} ${part.unit}${of()}`, [["step", part.first + i], ["text", short(part.words[i], 60)]]]);
  strip.addEventListener("keydown", event => {
    if (event.key === "Enter") choose(nodes.findIndex(node => node.classList.contains("here")));
  });
  return { redraw };
}

function svg(size, about, name = "") {
  const plot = shape("svg", { ...size, class: `plot ${name}`, role: "application", "aria-label": `${about}; arrow keys move` });
  plot.tabIndex = 0;
  return plot;
}
const sized = (width, height) => ({ viewBox: `0 0 ${width} ${height}`, width, height });
// Holds marks from 0 to 1000, stretched to the width of the plot. Texts stand outside of it.
const stretched = (height, y = 0) => shape("svg", { viewBox: `0 0 1000 ${height}`, y, height, preserveAspectRatio: "none", class: "stretched" });

function bars(part, box) {
  const [values, low, high] = [part.values, part.low, part.high].map(numbers), count = values.length;
  const redraw = () => {
    const seen = [...values, ...low, ...high].filter(Number.isFinite), [least, most] = [Math.min(0, ...seen), Math.max(0, ...seen)];
    const plot = svg({ height: 20 * count + 24 }, part.title, "bars"), axis = stretched(20 * count);
    const x = value => 1000 * (clamp(value, least, most) - least) / (most - least || 1);
    const rows = range(count).map(i => {
      const row = shape("g", {}), y = 20 * i, marks = stretched(20, y), value = Number.isNaN(values[i]) ? 0 : values[i];
      marks.append(shape("rect", { x: Math.min(x(0), x(value)), y: 3, width: Math.abs(x(value) - x(0)), height: 14, fill: css(value < 0 ? colours.less : colours.more) }));
      const interval = `M${x(low[i])} 10H${x(high[i])}M${x(low[i])} 6v8M${x(high[i])} 6v8`;
      if (!Number.isNaN(low[i])) marks.append(shape("path", { d: interval, class: "rim" }), shape("path", { d: interval, class: "interval" }));
      row.append(shape("rect", { y, height: 20, class: "row" }), shape("text", { x: -6, y: y + 14, "text-anchor": "end" }, short(label(part.axis, i), 18)), marks);
      return row;
    });
    axis.append(shape("path", { d: `M${x(0)} 0V${20 * count}`, class: "axis" }));
    // An end too close to 0 has no number of its own, which would lie over the other. The larger end names the unit.
    const far = most > -least ? most : least, ends = [least, most].filter(v => v && Math.abs(x(v) - x(0)) > 80);
    plot.append(...rows, axis, ...[0, ...ends].map(v => shape("text",
      { x: `${x(v) / 10}%`, y: 20 * count + 16, "text-anchor": v > 0 ? "end" : v < 0 ? "start" : "middle" },
      `${told(+v.toPrecision(3))}${v === far ? ` ${part.unit}` : ""}`)));
    spots(plot, rows, i => [`${told(values[i])} ${part.unit}`, [[named(part.axis, i), ""], ...(Number.isNaN(low[i]) ? [] : [["95 % interval", `${told(low[i])} to ${told(high[i])}`]])]]);
    box.lastElementChild?.matches("svg") && box.lastElementChild.remove();
    box.append(plot);
  };
  return { redraw };
}

function histogram(part, box) {
  const counts = numbers(part.values), largest = Math.max(...counts), step = part.largest / counts.length, width = 1000 / counts.length;
  const redraw = () => {
    const bottom = 74, plot = svg({ height: 108 }, part.title, "histogram"), marks = stretched(108);
    const columns = range(counts.length).map(i => {
      const column = shape("g", {}), high = counts[i] ? Math.max(2, (bottom - 12) * counts[i] / largest) : 0;
      column.append(shape("rect", { x: width * i, y: 0, width, height: bottom, class: "row" }),
        shape("rect", { x: width * (i + .05), y: bottom - high, width: .9 * width, height: high, fill: css(colours.more) }));
      return column;
    });
    marks.append(...columns, shape("path", { d: `M0 12V${bottom}H1000`, class: "axis", fill: "none" }));
    plot.append(marks, shape("text", { x: -6, y: 16, "text-anchor": "end" }, told(largest)),
      ...[0, part.largest].map((v, i) => shape("text", { x: i && "100%", y: bottom + 14, "text-anchor": i ? "end" : "start" }, told(+v.toPrecision(3)))),
      shape("text", { x: "50%", y: 104, "text-anchor": "middle" }, part.xname));
    spots(plot, columns, i => [`${told(counts[i])} ${part.unit}`, [[part.xname, `${told(+(i * step).toPrecision(3))} to ${told(+((i + 1) * step).toPrecision(3))}`]]]);
    box.lastElementChild?.matches("svg") && box.lastElementChild.remove();
    box.append(plot);
  };
  return { redraw };
}

function lines(part, box) {
  const xs = numbers(part.x), series = Object.entries(part.series).map(([name, packed]) => [name, numbers(packed)]);
  const dashes = ["", "7 3", "2 3", "9 3 2 3"];
  const redraw = () => {
    const height = 300, bottom = 262, plot = svg({ height }, part.title, "lines"), marks = stretched(height), names = shape("svg", { x: "100%", overflow: "visible" });
    const seen = series.flatMap(([, ys]) => [...ys]).filter(Number.isFinite);
    const bounds = all => all.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
    const [[x0, x1], [y0, y1]] = [bounds([...xs]), bounds([0, ...seen])];
    const x = v => 1000 * (v - x0) / (x1 - x0 || 1), y = v => bottom - (v - y0) / (y1 - y0 || 1) * (bottom - 14);
    const colour = s => css(s % 2 ? colours.less : colours.more), axes = shape("path", { d: `M0 14V${bottom}H1000`, class: "axis", fill: "none" }), mark = shape("path", { class: "axis" });
    marks.append(axes, mark);
    plot.append(marks, names, ...[y0, y1].map(v => shape("text", { x: -6, y: y(v) + 4, "text-anchor": "end" }, told(+v.toPrecision(3)))),
      ...[x0, x1].map((v, i) => shape("text", { x: i && "100%", y: bottom + 16, "text-anchor": i ? "end" : "start" }, told(v))),
      shape("text", { x: "50%", y: height - 6, "text-anchor": "middle" }, part.xname));
    series.forEach(([name, ys], s) => {
      const points = [...ys].flatMap((v, i) => Number.isFinite(v) ? [`${x(xs[i]).toFixed(1)} ${y(v).toFixed(1)}`] : []);
      if (points.length === 1) points.push(points[0]);
      if (points.length) marks.append(shape("path", { d: `M${points.join("L")}`, fill: "none", stroke: colour(s), "stroke-width": 2, "stroke-linecap": "round", "stroke-dasharray": dashes[Math.floor(s / 2) % 4] }));
      const high = 26 + 15 * s;
      if (series.length <= 8) names.append(shape("text", { x: -34, y: high, "text-anchor": "end" }, short(name, 30)),
        shape("path", { d: `M-28 ${high - 4}h26`, stroke: colour(s), "stroke-width": 2, "stroke-dasharray": dashes[Math.floor(s / 2) % 4] }));
    });
    let now = xs.length - 1;
    const go = (i, px, py) => {
      now = i;
      mark.setAttribute("d", `M${x(xs[i])} 14V${bottom}`);
      const spot = axes.getBoundingClientRect();
      tell(px ?? spot.left + x(xs[i]) * spot.width / 1000, py ?? spot.top + 26, `${part.xname} ${told(xs[i])}`, series.filter(([, ys]) => !Number.isNaN(ys[i])).slice(0, 12).map(([name, ys]) => [name, `${told(ys[i])} ${part.unit}`]));
    };
    plot.onpointermove = event => {
      const spot = axes.getBoundingClientRect(), px = 1000 * (event.clientX - spot.left) / spot.width;
      go(range(xs.length).reduce((best, i) => Math.abs(x(xs[i]) - px) < Math.abs(x(xs[best]) - px) ? i : best, 0), event.clientX, event.clientY);
    };
    plot.onpointerleave = plot.onblur = hush;
    plot.onkeydown = event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); go(clamp(now + step, 0, xs.length - 1)); }
    };
    box.lastElementChild?.matches("svg") && box.lastElementChild.remove();
    box.append(plot);
  };
  return { redraw };
}

function reached(nodes, edges, from, to) {
  const seen = new Set(nodes);
  for (let size = -1; size !== seen.size;) {
    size = seen.size;
    for (const edge of edges) if (seen.has(edge[from])) seen.add(edge[to]);
  }
  return seen;
}

function network(part, box) {
  const scores = numbers(part.scores), slider = Object.assign(make("input"), { type: "range", min: 1, max: Math.max(1, part.edges.length), value: part.edges.length });
  const line = make("label", "legend", "edges, the strongest first "), shown = make("output"), frame = make("div", "box");
  slider.setAttribute("aria-label", "number of edges");
  frame.tabIndex = -1;
  frame.style.maxHeight = "none";
  line.append(slider, shown);
  const meaning = make("p", "legend");
  box.append(line, meaning, frame);
  const redraw = () => {
    const kind = (colour, dash, said) => { const rule = make("span", "rule"); rule.style.borderTop = `3px ${dash} ${css(colour)}`; return [rule, make("span", "", said)]; };
    const signs = new Set(scores.map(Math.sign));
    meaning.replaceChildren(...(signs.has(-1) ? kind(colours.more, "solid", "helps: without it the metric falls") : []), ...(signs.has(1) ? kind(colours.less, "dashed", "hinders") : []),
      ...(part.edges.some(edge => edge[2]) ? [make("span", "", "q, k, v: what of a head it enters")] : []), ...part.names.map(name => make("span", "", name)));
    const chosen = part.edges.slice(0, +slider.value).map((edge, i) => [...edge.slice(0, 2), edge[2], i]);
    const ahead = reached(part.rows[0], chosen, 0, 1), back = reached(part.rows.at(-1), chosen, 1, 0);
    const kept = chosen.filter(([from, to]) => ahead.has(from) && back.has(to)), alive = new Set(kept.flatMap(([from, to]) => [from, to]));
    const rows = part.rows.map(row => row.filter(node => alive.has(node))).filter(row => row.length);
    // No edge passes behind a node: MLPs stand to the right of the heads, the later the further, so what is above one is free; and edges
    // between heads that are further apart go along the left.
    const isMlp = node => /^m\d+$/.test(node), mlps = rows.flat().filter(isMlp), left = 50, gap = clamp(400 / mlps.length, 6, 44);
    const inner = Math.max(240, 86 * Math.max(1, ...rows.map(row => row.length))), width = left + inner + 100 + gap * mlps.length, height = 64 * rows.length, plot = svg(sized(width, height), part.title), place = {};
    plot.style.maxWidth = "none";
    rows.forEach((row, r) => row.forEach((node, i) => { place[node] = [left + (isMlp(node) ? inner + 50 + gap * mlps.indexOf(node) : inner * (i + 0.5) / row.length), height - 32 - 64 * r]; }));
    const most = Math.max(...scores.map(Math.abs).filter(Number.isFinite), 0) || 1, ports = { q: -22, k: 0, v: 22 };
    const paths = kept.map(([from, to, port, i]) => {
      const [x1, y1] = place[from], [x2, y2] = place[to], x = x2 + (ports[port] ?? 0), score = Number.isNaN(scores[i]) ? 0 : scores[i];
      const lane = isMlp(from) ? x1 : isMlp(to) ? x : 4 + 5 * i % 40, turn = (a, b, y) => a === b ? "" : `C${a} ${y - 28} ${b} ${y - 12} ${b} ${y - 40}`;
      const way = y1 - y2 === 64 ? turn(x1, x, y1 - 12) : `${turn(x1, lane, y1 - 12)}V${y2 + 52}${turn(lane, x, y2 + 52)}V${y2 + 12}`;
      return shape("path", { d: `M${x1} ${y1 - 12}${way || `V${y2 + 12}`}`, fill: "none",
        stroke: css(score < 0 ? colours.more : score > 0 ? colours.less : colours.unknown), "stroke-width": 1 + 4 * Math.abs(score) / most, "stroke-dasharray": score > 0 ? "6 3" : "" });
    });
    plot.append(...paths);
    for (const [node, [x, y]] of Object.entries(place)) {
      const group = shape("g", { class: "node" });
      group.append(shape("rect", { x: x - 36, y: y - 12, width: 72, height: 24, rx: 6 }), shape("text", { x, y: y + 4, "text-anchor": "middle" }, short(node, 10)));
      group.onpointermove = event => tell(event.clientX, event.clientY, node, kept.flatMap(([from, to, port, i]) => from === node || to === node ? [[`${from} → ${to}${port ? ` ${port}` : ""}`, told(scores[i])]] : []).slice(0, 8));
      group.onpointerleave = hush;
      plot.append(group);
    }
    // What of a head an edge enters; heads alone have such parts.
    for (const key of new Set(kept.filter(edge => edge[2]).map(([, to, port]) => `${to} ${port}`))) {
      const [to, port] = key.split(" "), [x, y] = place[to];
      plot.append(shape("text", { x: x + ports[port] + 4, y: y + 23, class: "port" }, port));
    }
    spots(plot, paths, i => [`${kept[i][0]} → ${kept[i][1]}${kept[i][2] ? ` ${kept[i][2]}` : ""}`, [["score", `${told(scores[kept[i][3]])}`]]]);
    frame.replaceChildren(plot);
    const measured = (part.faithfulness ?? []).reduce((best, point) => !best || Math.abs(point[0] - slider.value) < Math.abs(best[0] - slider.value) ? point : best, null);
    const loose = chosen.length - kept.length;
    shown.textContent = `${kept.length} of ${part.edges.length}${loose ? ` (${loose} more lead nowhere)` : ""}${measured ? `; faithfulness ${told(measured[1])} (measured with ${measured[0]} edges)` : ""}`;
  };
  slider.oninput = redraw;
  return { redraw };
}

// An attribution graph: layers upward, tokens across. One node is chosen; the strongest paths through it are drawn, and its links are listed.
function attribution(part, box) {
  const weights = numbers(part.weights), { nodes, links } = part, pins = new Set(part.pins), groups = part.groups.map(([name, ids]) => [name, [...ids]]);
  const [inputs, outputs] = [1, 0].map(end => nodes.map(() => []).map((_, n) => range(links.length).filter(i => links[i][end] === n).sort((i, j) => Math.abs(weights[j]) - Math.abs(weights[i]))));
  const order = range(nodes.length).sort((i, j) => (nodes[i].influence ?? 0) - (nodes[j].influence ?? 0));
  const slider = Object.assign(make("input"), { type: "range", min: 1, max: nodes.length, value: nodes.length }), line = make("label", "legend", "nodes, the most influential first "), shown = make("output");
  const frame = make("div", "box right"), side = make("section", "side"), below = make("div", "box"), tools = make("p", "legend"), state = make("textarea"), all = make("div", "traced"), drawing = make("div");
  const pin = make("button", "swap"), name = Object.assign(make("input"), { placeholder: "name of a group" }), group = make("button", "swap", "group the pinned nodes");
  // Later tokens act on no node, so the last column drawn has the logits.
  const tokens = part.tokens.slice(0, 1 + Math.max(...nodes.map(node => node.pos)));
  const weak = Object.assign(make("input"), { type: "checkbox" }), weakly = make("label", "legend");
  let chosen = part.start, place = {}, drawn = [];
  // The strongest path from a token up to a node, or from it to a logit, multiplies what each link is of all that its end gets.
  const share = i => Math.abs(weights[i]) / inputs[links[i][1]].reduce((sum, j) => sum + Math.abs(weights[j]), 0);
  const strongest = (ways, next, isEnd) => {
    const known = new Map();
    return function best(n) {
      if (!known.has(n)) {
        known.set(n, { product: isEnd(nodes[n]) ? 1 : 0, path: [] });
        for (const i of ways[n]) {
          const on = best(links[i][next]), product = share(i) * on.product;
          if (product > known.get(n).product) known.set(n, { product, path: [i, ...on.path] });
        }
      }
      return known.get(n);
    };
  };
  const down = strongest(inputs, 0, node => ["token", "position"].includes(node.kind)), up = strongest(outputs, 1, node => node.kind === "logit");
  const paths = n => inputs[n].map(i => ({ product: share(i) * down(links[i][0]).product, path: [i, ...down(links[i][0]).path] }))
    .filter(({ product }) => product).sort((a, b) => b.product - a.product).slice(0, 3).map(({ path }) => path);
  slider.setAttribute("aria-label", "number of nodes");
  name.setAttribute("aria-label", "name of a group");
  state.setAttribute("aria-label", "pins and groups, as the file has them");
  Object.assign(state, { readOnly: true, rows: 3 });
  frame.tabIndex = below.tabIndex = -1;
  line.append(slider, shown);
  weakly.append(weak, " weak links too");
  tools.append(weakly, pin, name, group);
  weak.onchange = () => draw();
  drawing.append(frame, tools);
  all.append(drawing, side);
  box.append(line, all, below, state);
  const title = n => `${nodes[n].label || nodes[n].id}`;
  const placed = n => nodes[n].kind === "token" ? `${title(n)} (${nodes[n].pos})` : title(n);
  const link = (i, end) => {
    const n = links[i][end], button = make("button", "link"), other = make("span", "", `${short(nodes[n].label, 30)} `);
    other.append(make("cite", "", nodes[n].id));
    const value = make("b", "", `${weights[i] < 0 ? "" : "+"}${told(weights[i])}`);
    value.style.color = css(weights[i] < 0 ? colours.less : colours.more);
    button.append(value, other);
    button.onclick = () => choose(n);
    return button;
  };
  const list = (heading, found, end) => found.length ? [make("h2", "", `${heading}, ${found.length}`), ...found.slice(0, 20).map(i => link(i, end))] : [];
  function describe() {
    const node = nodes[chosen], about = make("dl");
    for (const [key, value] of node.about) about.append(make("dt", "", key), make("dd", "", value));
    const examples = (node.examples ?? []).map(([tokens, values]) => {
      const strip = make("p", "text"), most = Math.max(...values) || 1;
      strip.append(...tokens.map((token, i) => {
        const span = make("span", "", token), colour = paint(values[i], most);
        Object.assign(span.style, { background: css(colour), color: onto(colour) });
        return span;
      }));
      return strip;
    });
    const steps = paths(chosen).map(path => make("p", "path", [...path.map(i => placed(links[i][0])).reverse(), title(chosen)].join(" → ")));
    side.replaceChildren(make("h2", "", title(chosen)), about, ...examples, ...(steps.length ? [make("h2", "", "strongest paths"), ...steps] : []), ...list("from", inputs[chosen], 0), ...list("to", outputs[chosen], 1));
    pin.textContent = pins.has(chosen) ? "unpin" : "pin";
  }
  function symbol(node, x, y) {
    if (node.kind === "feature") return shape("circle", { cx: x, cy: y, r: 5 });
    if (node.kind === "error") return shape("path", { d: `M${x} ${y - 6}l6 6l-6 6l-6 -6z` });
    if (node.kind === "head") return shape("path", { d: `M${x} ${y - 6}l6 11h-12z` });
    return shape("rect", { x: x - 5, y: y - 5, width: 10, height: 10 });
  }
  function draw() {
    const few = new Set(order.slice(0, +slider.value)), alive = range(nodes.length).filter(n => few.has(n) || pins.has(n) || n === chosen || nodes[n].kind === "logit");
    const cells = {}, levels = [...new Set(alive.map(n => nodes[n].layer))].sort((a, b) => a - b), across = 8, wide = {}, high = {};
    for (const n of alive) (cells[[nodes[n].layer, nodes[n].pos]] ??= []).push(n);
    for (const [key, cell] of Object.entries(cells)) {
      const [layer, pos] = key.split(",");
      wide[pos] = Math.max(wide[pos] ?? 20, 14 * Math.min(across, cell.length) + 4);
      high[layer] = Math.max(high[layer] ?? 34, 14 * Math.ceil(cell.length / across) + 20);
    }
    const left = tokens.reduce((sums, _, pos) => [...sums, sums[pos] + (wide[pos] ?? 20)], [64]), width = left.at(-1) + 64;
    let y = 10;
    const tops = {};
    for (const layer of [...levels].reverse()) { tops[layer] = y; y += high[layer]; }
    const plot = svg(sized(width, y + 30), part.title);
    plot.style.minWidth = `${0.47 * width}px`;
    place = {};
    for (const [key, cell] of Object.entries(cells)) {
      const [layer, pos] = key.split(",");
      cell.forEach((n, i) => { place[n] = [left[pos] + 8 + 14 * (i % across), tops[layer] + high[layer] - 14 - 14 * Math.floor(i / across)]; });
    }
    for (const layer of levels) {
      const [under, named] = [tops[layer] + high[layer], layer < 0 ? "embed" : layer === part.layers ? "logits" : `layer ${layer}`];
      plot.append(shape("path", { d: `M0 ${under}H${width}`, class: "rule" }), ...[4, width - 52].map(x => shape("text", { x, y: under - 10 }, named)));
    }
    tokens.forEach((token, pos) => plot.append(shape("text", { x: left[pos] + 6, y: y + 18 }, short(token, 6))));
    const near = [...inputs[chosen], ...outputs[chosen]], most = Math.max(...near.map(i => Math.abs(weights[i])), 1e-30), onPath = new Set([...paths(chosen).flat(), ...up(chosen).path]);
    const fan = near.filter(i => weak.checked || Math.abs(weights[i]) > most / 5).slice(0, 150);
    for (const i of new Set([...fan, ...onPath])) if (links[i].every(n => place[n])) {
      const [[x1, y1], [x2, y2]] = links[i].map(n => place[n]);
      plot.append(shape("path", { d: `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`, fill: "none", stroke: css(weights[i] < 0 ? colours.less : colours.more), "stroke-width": (onPath.has(i) ? 2 : 0.5) + 3 * Math.min(1, Math.abs(weights[i]) / most), "stroke-dasharray": weights[i] < 0 ? "6 3" : "", opacity: onPath.has(i) ? 1 : 0.45 }));
    }
    drawn = alive.sort((a, b) => place[b][1] - place[a][1] || place[a][0] - place[b][0]);
    for (const n of drawn) {
      const mark = symbol(nodes[n], ...place[n]);
      mark.setAttribute("class", `spot ${n === chosen ? "chosen" : ""} ${pins.has(n) ? "pinned" : ""} ${nodes[n].kind}`);
      mark.onpointermove = event => tell(event.clientX, event.clientY, title(n), [["", nodes[n].id], ...nodes[n].about.slice(0, 3)]);
      mark.onpointerleave = hush;
      mark.onclick = event => { choose(n); if (event.ctrlKey || event.metaKey) toggle(); };
      plot.append(mark);
    }
    plot.onkeydown = event => {
      const step = { ArrowLeft: -1, ArrowUp: 1, ArrowRight: 1, ArrowDown: -1 }[event.key];
      if (event.key === "Enter") toggle();
      if (!step) return;
      event.preventDefault();
      choose(drawn[clamp(drawn.indexOf(chosen) + step, 0, drawn.length - 1)], true);
    };
    frame.replaceChildren(plot);
    shown.textContent = `${alive.length} of ${nodes.length}`;
  }
  // The pinned nodes, and groups of them as one box each; a link adds up those of its members.
  function subgraph() {
    const grouped = new Set(groups.flatMap(([, ids]) => ids)), boxes = [...groups, ...[...pins].filter(n => !grouped.has(n)).map(n => [title(n), [n]])];
    const levels = [...new Set(boxes.map(([, ids]) => Math.max(...ids.map(n => nodes[n].layer))))].sort((a, b) => a - b);
    const rows = levels.map(layer => boxes.filter(([, ids]) => Math.max(...ids.map(n => nodes[n].layer)) === layer)), where = new Map();
    const width = Math.max(320, 150 * Math.max(0, ...rows.map(row => row.length))), plot = svg(sized(width, 64 * rows.length), "pinned nodes");
    rows.forEach((row, r) => row.forEach((one, i) => where.set(one, [width * (i + 0.5) / row.length, 64 * (rows.length - r) - 32])));
    const sums = boxes.flatMap(from => boxes.filter(to => to !== from).map(to => [from, to, links.reduce((sum, [a, b], i) => sum + (from[1].includes(a) && to[1].includes(b) ? weights[i] : 0), 0)])).filter(([, , sum]) => sum);
    const most = Math.max(...sums.map(([, , sum]) => Math.abs(sum)), 1e-30);
    for (const [from, to, sum] of sums) {
      const [x1, y1] = where.get(from), [x2, y2] = where.get(to), path = shape("path", { d: `M${x1} ${y1 - 12}L${x2} ${y2 + 12}`, stroke: css(sum < 0 ? colours.less : colours.more), "stroke-width": 1 + 5 * Math.abs(sum) / most, "stroke-dasharray": sum < 0 ? "6 3" : "" });
      path.onpointermove = event => tell(event.clientX, event.clientY, told(sum), [["from", from[0]], ["to", to[0]]]);
      path.onpointerleave = hush;
      plot.append(path);
    }
    for (const [one, [x, y]] of where) {
      const label = shape("g", { class: "node" });
      label.append(shape("rect", { x: x - 66, y: y - 12, width: 132, height: 24, rx: 6 }), shape("text", { x, y: y + 4, "text-anchor": "middle" }, short(one[0], 18)));
      label.onclick = () => choose(one[1][0]);
      plot.append(label);
    }
    below.hidden = state.hidden = !boxes.length;
    below.replaceChildren(plot);
    const id = n => nodes[n].id;
    state.value = JSON.stringify({ pinnedIds: [...pins].map(id), supernodes: groups.map(([name, ids]) => [name, ...ids.map(id)]) });
  }
  function choose(n, scroll = false) {
    chosen = n;
    draw();
    describe();
    if (scroll) frame.querySelector(".chosen").scrollIntoView({ block: "nearest", inline: "nearest" });
    if (scroll) frame.querySelector("svg").focus({ preventScroll: true });
  }
  function toggle() {
    if (!pins.delete(chosen)) pins.add(chosen);
    redraw();
  }
  const redraw = () => { draw(); describe(); subgraph(); };
  pin.onclick = toggle;
  group.onclick = () => {
    const free = [...pins].filter(n => !groups.some(([, ids]) => ids.includes(n)));
    if (free.length) groups.push([name.value || `group ${groups.length + 1}`, free]);
    subgraph();
  };
  slider.oninput = draw;
  return { redraw };
}

const kinds = { grid, text, steps, bars, histogram, lines, network, attribution };
readColours();
const parts = page.parts.map((part, i) => {
  const box = document.querySelector(`[data-part="${i}"]`);
  if (part.note) box.append(make("p", "note", part.note));
  return kinds[part.kind](part, box);
});
function drawAll() {
  readColours();
  for (const part of parts) part.redraw();
}
drawAll();
isDark.addEventListener("change", drawAll);
if (window.parent !== window)
  new ResizeObserver(([{ borderBoxSize }]) => window.parent.postMessage(Math.ceil(borderBoxSize[0].blockSize), "*")).observe(document.body);
