// Curves over time, as SVG.
import { svg, kindColour, number, rateText } from "./h.js";

const left = 40, right = 6, top = 8, bottom = 18;

// steps are round values that enclose those from low to most.
function steps(low, most, whole) {
  if (!(most > low)) most = low + 1;
  const raw = (most - low) / 3, unit = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((k) => k * unit).find((s) => s >= raw);
  if (whole) step = Math.max(1, Math.ceil(step));
  const all = [];
  for (let v = Math.floor(low / step) * step; v < most + step * 0.999; v += step) all.push(+v.toPrecision(12));
  return all;
}

const spans = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

function span(seconds) {
  if (seconds < 60) return seconds + "s";
  if (seconds < 3600) return seconds / 60 + "m";
  return seconds < 172800 ? seconds / 3600 + "h" : seconds / 86400 + "d";
}

// frame makes the axes of a chart; x and y lead from values to places.
function frame(box, height, from, to, low, most, whole, text) {
  const width = Math.max(200, box.clientWidth);
  const ys = steps(low, most, whole), base = ys[0], high = ys[ys.length - 1];
  const x = (t) => left + ((t - from) / Math.max(1, to - from)) * (width - left - right);
  const y = (v) => top + (1 - (v - base) / (high - base)) * (height - top - bottom);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  for (const v of ys) {
    root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
      svg("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, text(v)));
  }
  const total = (to - from) / 1000, room = Math.max(2, Math.floor((width - left) / 90));
  const step = spans.find((s) => total / s <= room) ?? 604800;
  for (let s = 0; s <= total; s += step) {
    const at = x(from + s * 1000), near = width - right - at;
    root.append(svg("text", { x: at, y: height - 3, "text-anchor": s === 0 ? "start" : near < 14 ? "end" : "middle" }, s === 0 ? "0" : span(s)));
  }
  return { root, x, y, width, height, base };
}

// sizes draws the number of workers, with the beginnings of generations in the colours of their
// causes.
export function sizes(box, worlds, from, to, label) {
  const most = Math.max(1, ...worlds.map((w) => w.size));
  const f = frame(box, 132, from, to, 0, most, true, (v) => number(v));
  f.root.setAttribute("aria-label", label);
  let line = "", area = "";
  worlds.forEach((w, i) => {
    const a = f.x(Date.parse(w.time)), b = f.x(i + 1 < worlds.length ? Date.parse(worlds[i + 1].time) : to), v = f.y(w.size);
    line += (i ? "V" + v.toFixed(1) : `M${a.toFixed(1)} ${v.toFixed(1)}`) + `H${b.toFixed(1)}`;
    area += `M${a.toFixed(1)} ${f.y(0)}V${v.toFixed(1)}H${b.toFixed(1)}V${f.y(0)}Z`;
  });
  f.root.append(svg("path", { class: "area", d: area }), svg("path", { class: "curve", d: line }));
  let last = -9;
  for (const w of worlds) {
    const at = f.x(Date.parse(w.time));
    if (at - last < 1.5) continue;
    last = at;
    const mark = svg("g", {});
    const stem = svg("line", { x1: at, x2: at, y1: f.y(0), y2: f.y(w.size), "stroke-width": 1.5 });
    const head = svg("circle", { cx: at, cy: f.y(w.size), r: worlds.length > 120 ? 2 : 3.5 });
    stem.style.stroke = head.style.fill = kindColour(w.kind);
    mark.append(stem, head);
    f.root.append(mark);
  }
  box.replaceChildren(f.root);
  return f;
}

// rates draws commits per second. Where nothing was known for long the curve has a gap.
export function rates(box, points, from, to, label) {
  const most = Math.max(...points.map((p) => p[1]), 0.1);
  return line(box, frame(box, 132, from, to, 0, most, false, (v) => (v >= 10 || v === 0 ? number(v) : String(+v.toPrecision(2)))), points, label);
}

// figure draws a number that the program reports, between its smallest and its largest value.
export function figure(box, points, from, to, label) {
  const values = points.map((p) => p[1]);
  return line(box, frame(box, 100, from, to, Math.min(...values), Math.max(...values), false, (v) => String(+v.toPrecision(3))), points, label);
}

function line(box, f, points, label) {
  f.root.setAttribute("aria-label", label);
  let path = "", area = "", begin = 0, gap = 15000, previous = null;
  if (points.length > 3) gap = Math.max(gap, ((points[points.length - 1][0] - points[0][0]) / points.length) * 6);
  for (const [t, r] of points) {
    const a = f.x(t).toFixed(1), v = f.y(r).toFixed(1);
    if (previous == null || t - previous > gap) {
      if (previous != null) area += `V${f.y(f.base)}H${begin}Z`;
      path += `M${a} ${v}`;
      area += `M${a} ${f.y(f.base)}V${v}`;
      begin = a;
    } else {
      path += `L${a} ${v}`;
      area += `L${a} ${v}`;
    }
    previous = t;
  }
  if (area) area += `V${f.y(f.base)}H${begin}Z`;
  f.root.append(svg("path", { class: "area", d: area }), svg("path", { class: "curve", d: path }));
  box.replaceChildren(f.root);
  return f;
}

// hover has say called with the time under the pointer, or null, and draws a line there.
export function hover(box, f, from, to, say) {
  const line = svg("line", { class: "cross", y1: top, y2: f.height - bottom, visibility: "hidden" });
  f.root.append(line);
  const move = (e) => {
    const b = f.root.getBoundingClientRect(), px = ((e.clientX - b.left) / b.width) * f.width;
    const t = from + ((px - left) / (f.width - left - right)) * (to - from);
    if (t < from || t > to) return leave();
    line.setAttribute("x1", px);
    line.setAttribute("x2", px);
    line.setAttribute("visibility", "visible");
    say(t);
  };
  const leave = () => {
    line.setAttribute("visibility", "hidden");
    say(null);
  };
  f.root.addEventListener("pointermove", move);
  f.root.addEventListener("pointerdown", move);
  f.root.addEventListener("pointerleave", leave);
}

export { rateText };
