// Follows the job by server-sent events, and draws what has changed, once a frame.
import { byId, set } from "./h.js";
import * as draw from "./draw.js";
import * as act from "./act.js";

// view is all that the page knows of the job. Messages change it; draw only reads it.
export const view = {
  seq: 0, now: 0, at: 0, rate: 0, job: null, hosts: [], slots: [], commits: [], waits: [], worlds: [], forgotten: 0,
  recoveries: null, points: [], curves: {}, goodput: { seconds: 0, parts: [] }, tasks: null, events: [], write: false, proof: "", live: false, lost: 0, stale: false,
};
const most = 1000; // events

const dirty = new Set();
let frame = 0;

export function redraw(...names) {
  for (const n of names) dirty.add(n);
  if (!frame) frame = requestAnimationFrame(paint);
}

function paint() {
  frame = 0;
  const these = new Set(dirty);
  dirty.clear();
  if (!view.job) return;
  draw.all(view, these);
}

// time is the time of the job's machine.
export const time = () => view.now + (view.live ? performance.now() - view.at : 0);

function take(m, whole) {
  view.seq = m.seq;
  view.now = m.now;
  view.at = performance.now();
  view.rate = m.rate;
  for (const key of ["job", "hosts", "waits", "goodput", "worlds", "forgotten", "recoveries", "points", "curves", "tasks", "slots"]) {
    if (key in m) {
      view[key] = m[key];
      dirty.add(key);
    }
  }
  if (m.more) {
    view.points = view.points.concat(m.more);
    dirty.add("points");
  }
  for (const [i, slot] of Object.entries(m.changed ?? {})) {
    view.slots[i] = slot;
    draw.slotChanged(+i);
    dirty.add("changed");
  }
  if (!whole) report(m.now);
  if (m.commits) {
    view.commits = m.commits;
    dirty.add("commits");
  }
  if (whole) view.events = [];
  if (m.events) {
    view.events = view.events.concat(m.events).slice(-most);
    dirty.add("events");
  }
  if (whole) dirty.add("all");
  redraw("tick");
}

// report adds what rank 0 reports to the curves, about once a second.
function report(now) {
  for (const f of view.slots.find((s) => s.rank === 0)?.figures ?? []) {
    const points = (view.curves[f.name] ??= []);
    if (f.value == null || (points.length && now - points[points.length - 1][0] < 1000)) continue;
    points.push([now, f.value]);
    if (points.length > 2 * most) view.curves[f.name] = points.filter((p, i) => i % 2);
    dirty.add("curves");
  }
}

let stream = null, again = 0, hiddenSince = 0;

function link(state, text) {
  const e = byId("link");
  e.className = "link " + state;
  set(e, text);
  view.live = state === "live";
  if (view.live) view.stale = false;
  if (state !== "off") view.lost = 0;
  else view.lost ||= Date.now();
}

async function rights() {
  // The URL that a token led to has the proof for commands. It stays with this tab: cookies go to all ports of a host.
  const mark = /^#steer=(.+)$/.exec(location.hash);
  if (mark) {
    sessionStorage.setItem("steer", mark[1]);
    history.replaceState(null, "", "/");
  }
  view.proof = sessionStorage.getItem("steer") ?? "";
  const answer = await fetch("/api/rights", { headers: { "X-Hvdrun-Proof": view.proof } });
  if (answer.status === 401) return false;
  if (!answer.ok) throw new Error(answer.statusText);
  const r = await answer.json();
  view.write = r.write;
  return true;
}

// connect opens the stream, which the browser opens again by itself while the server answers.
async function connect() {
  clearTimeout(again);
  stream?.close();
  stream = null;
  try {
    if (!(await rights())) {
      link("off", "this page needs its token again");
      Object.assign(view, { lost: 0, stale: true });
      if (view.job) redraw("job");
      return retry(5000);
    }
  } catch {
    link("off", "no answer; trying again…");
    if (view.job) redraw("job");
    return retry(2000);
  }
  stream = new EventSource("/api/stream");
  const got = (whole) => (e) => {
    link("live", "live");
    take(JSON.parse(e.data), whole);
  };
  stream.addEventListener("full", got(true));
  stream.addEventListener("patch", got(false));
  stream.addEventListener("error", () => {
    link("off", "connection lost; trying again…");
    redraw("job");
    retry(1500);
  });
}

function retry(after) {
  stream?.close();
  stream = null;
  clearTimeout(again);
  again = setTimeout(connect, after);
}

// A page that nobody sees does not cost the server a stream.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    hiddenSince = setTimeout(() => {
      stream?.close();
      stream = null;
      clearTimeout(again);
      link("", "paused while hidden");
    }, 60000);
    return;
  }
  clearTimeout(hiddenSince);
  if (!stream) connect();
});
setInterval(() => redraw("clock"), 1000);
addEventListener("resize", () => redraw("size"));
act.begin(view);
draw.begin(view, redraw);
connect();
