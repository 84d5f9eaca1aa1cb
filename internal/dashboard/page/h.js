// Makes elements and texts. Nothing that comes from a job ever becomes markup: it is text only.

// clean shows what could command a terminal or turn the direction of a line.
export function clean(text) {
  return String(text ?? "").replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (c) => "\\x" + c.codePointAt(0).toString(16).padStart(2, "0"));
}

// h makes an element with properties and children, which are elements or texts.
export function h(name, props, ...children) {
  const at = name.split(".");
  const e = document.createElement(at[0]);
  if (at.length > 1) e.className = at.slice(1).join(" ");
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (key in e) e[key] = value;
    else e.setAttribute(key, value === true ? "" : value);
  }
  put(e, ...children);
  return e;
}

export function put(e, ...children) {
  for (const c of children.flat()) if (c != null && c !== false) e.append(c instanceof Node ? c : clean(c));
  return e;
}

export function fill(e, ...children) {
  e.replaceChildren();
  return put(e, ...children);
}

export function svg(name, attributes, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes ?? {})) e.setAttribute(key, value);
  for (const c of children.flat()) e.append(c);
  return e;
}

export const byId = (id) => document.getElementById(id);

// set changes a text only where it differs.
export function set(e, text) {
  text = clean(text);
  if (e.textContent !== text) e.textContent = text;
}

const whole = new Intl.NumberFormat("en-US");
export const number = (n) => whole.format(Math.round(n));

export function rateText(r) {
  if (!(r > 0)) return "0";
  if (r >= 100) return number(r);
  return r >= 10 ? r.toFixed(1) : r.toFixed(2);
}

export function bytes(n) {
  if (n >= 2 ** 30) return (n / 2 ** 30).toFixed(1) + " GiB";
  return n >= 2 ** 20 ? Math.round(n / 2 ** 20) + " MiB" : Math.round(n / 1024) + " KiB";
}

export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 0.0995) return (s * 1000).toFixed(s < 0.00995 ? 1 : 0) + " ms";
  if (s < 9.95) return s.toFixed(s < 0.995 ? 2 : 1) + " s";
  if (s < 59.5) return s.toFixed(0) + " s";
  const m = Math.round(s / 60);
  if (s < 3570) return Math.floor(s / 60) + " min" + (s < 600 ? " " + Math.floor(s % 60) + " s" : "");
  if (m < 48 * 60) return Math.floor(m / 60) + " h " + (m % 60) + " min";
  return Math.floor(m / 1440) + " d " + Math.floor((m % 1440) / 60) + " h";
}

const two = (n) => String(n).padStart(2, "0");
export function clock(time, now) {
  const t = new Date(time);
  if (Number.isNaN(t.getTime())) return "";
  const day = t.toDateString() === new Date(now ?? Date.now()).toDateString() ? "" : `${two(t.getMonth() + 1)}-${two(t.getDate())} `;
  return `${day}${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
}

export const kinds = {
  start: "start", failure: "failure", stall: "stall", excluded: "exclusion", drained: "drain", scaled: "scaled", grown: "growth",
  shrunk: "removal", changed: "hosts changed", driver: "new driver", asked: "command", ended: "end", other: "other",
};
export const kindColour = (kind) => `var(--k-${kind in kinds ? kind : "other"})`;

export function dot(kind) {
  const d = h("span.dot", { "aria-hidden": "true" });
  d.style.background = kindColour(kind);
  return d;
}
