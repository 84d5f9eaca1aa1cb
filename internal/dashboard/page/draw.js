// Draws the view. Each section is drawn anew only where its part of the view has changed; the slots
// of a large world one by one.
import { byId, h, fill, set, clean, number, bytes, rateText, duration, clock, kinds, kindColour, dot } from "./h.js";
import * as chart from "./chart.js";
import * as act from "./act.js";
import { time } from "./app.js";

let view, redraw;
let cells = []; // of the slots, in the order of view.slots
let places = []; // host and slot of each
let picked = ""; // host and slot, as a key
let changed = new Set();
let asRanks = false, rankLimit = 100, worldLimit = 12;

const mark = { starting: "·", ready: "…", leaving: "↓", stopping: "×", free: "", excluded: "✕", drained: "–", held: "■" };
const words = {
  training: "training", ready: "waits to join", starting: "starting", leaving: "leaving", stopping: "being stopped", free: "free",
  excluded: "excluded", drained: "drained", held: "held",
};
const key = (host, slot) => host + "\n" + slot;
const ended = () => view.job.state === "done" || view.job.state === "failed";

export function begin(v, again) {
  view = v;
  redraw = again;
  byId("as-hosts").addEventListener("click", () => mode(false));
  byId("as-ranks").addEventListener("click", () => mode(true));
  byId("hosts").addEventListener("keydown", arrows);
  byId("filter").addEventListener("input", () => redraw("events"));
  for (const k of Object.keys(kinds)) byId("kind").append(h("option", { value: k }, kinds[k]));
  byId("kind").addEventListener("change", () => redraw("events"));
  byId("output-rank").addEventListener("change", () => output(true));
  byId("out-stdout").addEventListener("click", () => choosing("stdout"));
  byId("out-stderr").addEventListener("click", () => choosing("stderr"));
  setInterval(() => output(false), 2000);
}

function mode(ranks) {
  asRanks = ranks;
  byId("as-hosts").setAttribute("aria-pressed", !ranks);
  byId("as-ranks").setAttribute("aria-pressed", ranks);
  byId("hosts").hidden = ranks;
  byId("ranks").hidden = !ranks;
  redraw("ranks");
}

export const slotChanged = (i) => changed.add(i);

export function all(v, d) {
  const any = (...names) => d.has("all") || names.some((n) => d.has(n));
  const fresh = d.has("all") || d.has("hosts") || d.has("slots");
  if (any("job", "tick", "clock")) header();
  if (any("job", "tick", "commits", "goodput", "clock")) tiles();
  if (fresh) world();
  else if (d.has("changed")) for (const i of changed) cell(i);
  if (fresh || d.has("changed")) {
    legend();
    stragglers();
  }
  changed.clear();
  if (any("job", "waits", "clock", "slots", "changed")) banners();
  if (asRanks && any("hosts", "slots", "changed", "commits", "ranks")) ranks();
  if (any("hosts", "slots", "changed", "commits", "job", "pick")) slot();
  if (any("worlds", "points", "curves", "size") || (d.has("tick") && !ended())) charts();
  if (any("worlds", "forgotten", "more")) worlds();
  if (any("goodput")) parts();
  if (any("recoveries")) recoveries();
  if (any("tasks")) tasks();
  if (any("events")) events();
}

const looks = {
  running: "good", done: "good", failed: "bad", stopped: "warn", waiting: "warn", starting: "busy", resetting: "busy", finishing: "busy", stopping: "warn",
};

// silent returns whether the page has had no answer for so long that hvdrun may have died.
const silent = () => view.lost && !ended() && Date.now() - view.lost > 5000;

function header() {
  const j = view.job;
  const gone = (!j.driver_pid || silent()) && !ended(), e = byId("state");
  const state = silent() ? "no answer" : gone ? "no driver" : j.stopped ? "stopped" : j.state;
  document.title = `${j.job.slice(0, 8)} · ${state} · hvdrun`;
  set(byId("job"), j.job);
  set(byId("command"), j.command.join(" "));
  byId("command").title = clean(j.command.join(" "));
  set(e, state);
  e.className = "state " + (gone ? "bad" : looks[state] ?? "");
  byId("steer").hidden = !view.write;
  byId("readonly").hidden = view.write;
  const cannot = act.why();
  for (const id of ["scale", "stop"]) {
    byId(id).disabled = cannot !== "";
    byId(id).title = cannot ? "Not now: " + cannot : "";
  }
}

function banners() {
  const j = view.job, list = [];
  const banner = (kind, ...text) => list.push(h("div.banner" + (kind ? "." + kind : ""), { role: kind === "bad" ? "alert" : null }, ...text));
  if (ended()) {
    if (j.stopped) banner("", "The job was ", j.message);
    else if (j.state === "failed") banner("bad", "The job has failed: ", j.message || "no reason is known");
    else banner("good", "The job is done." + (j.message ? " " + j.message : ""));
  } else if (view.stale) {
    banner("bad", "The token of this page has ended: another hvdrun may have taken the job over. ",
      h("code", null, `hvdrun dashboard ${j.job} --url`), " prints the new URL.");
  } else if (silent()) {
    banner("bad", `This page has had no answer since ${clock(new Date(view.lost).toISOString(), view.now)}: hvdrun may have died. `,
      h("code", null, "hvdrun jobs"), " tells; ", h("code", null, "hvdrun resume " + j.job), " takes the job over. Its workers may train on.");
  } else if (j.problem) banner("bad", "The job cannot be asked: ", j.problem);
  else if (!j.driver_pid) {
    banner("bad", `The job’s hvdrun is gone; this is how the job was at ${clock(j.last_event, view.now)}. Its workers may train on: `,
      h("code", null, "hvdrun resume " + j.job), " takes the job over.");
  }
  if (j.journal) banner("", "The job could not be resumed now, its journal is ", j.journal);
  if (!ended()) {
    const hung = view.slots.map((s, i) => ({ s, p: places[i] })).filter((x) => x.s.where && x.p);
    for (const { s, p } of hung.slice(0, 3)) {
      banner("", h("b", null, `${s.rank == null ? "A worker" : "Rank " + s.rank} on ${p.host}:${p.slot} holds up the others`), " at ", h("code", null, s.where),
        s.what ? ": " + s.what : "",
        view.write && !act.why() && " ", view.write && !act.why() && h("button.danger", { type: "button", onclick: () => act.exclude(p.host, p.slot) }, "Exclude…"));
    }
    if (hung.length > 3) banner("", `${number(hung.length - 3)} more workers hold up the others: choose their slots`);
  }
  if (j.driver_pid && !ended()) {
    for (const w of view.waits ?? []) {
      banner("", "Waiting for ", w.for, ", ", h("b", null, duration((Date.parse(w.until) - time()) / 1000)), " left");
    }
  }
  if (!view.live && !silent() && !view.stale) return; // what was known last stays as it was
  fill(byId("banners"), ...list.slice(0, 6));
}

function allowed(j) {
  if (!j.elastic) return "of " + j.np + ", not elastic";
  return j.max_np ? `${j.min_np} to ${j.max_np} allowed` : `${j.min_np} or more allowed`;
}

let tile = null;
function tiles() {
  const j = view.job, over = ended(), now = over || !j.driver_pid ? Date.parse(j.last_event) : time();
  const newest = Math.max(j.commits ?? 0, ...view.commits.filter((c) => c != null));
  const at = newest || (view.worlds.length ? view.worlds[view.worlds.length - 1].commits : 0);
  const total = spent() ? view.goodput.seconds : 0, trained = total ? view.goodput.parts.find((p) => p.part === "training").seconds : 0;
  const mean = view.points.length ? view.points.reduce((s, p) => s + p[1], 0) / view.points.length : 0;
  const rows = [
    ["Workers", j.size ? number(j.size) : "–", j.size || !j.driver_pid ? allowed(j) : `${number(j.np)} slots are needed`],
    ["Commit", at ? number(at) : "–", over || !j.driver_pid ? (mean ? rateText(mean) + " per second on average" : "") : at ? rateText(view.rate) + " per second" : "none yet"],
    ["Generation", j.generation ? number(j.generation) : "–", j.generation ? "since " + clock(view.worlds.at(-1)?.time ?? j.since, now) : "no world yet"],
    ["Resets", number(j.resets), lostText()],
    ["Training", total > 0 ? ((100 * trained) / total).toFixed(1) + " %" : "–", total > 0 ? duration(total - trained) + " went elsewhere" : ""],
    [over ? "Took" : "Runs for", duration((now - Date.parse(j.begun)) / 1000), "since " + clock(j.begun, now)],
  ];
  if (!tile) {
    tile = rows.map(() => ({ dt: h("dt"), dd: h("dd"), small: h("small") }));
    fill(byId("tiles"), ...tile.map((t) => h("dl.tile", null, t.dt, h("dd", null), t.small)));
    byId("tiles").querySelectorAll("dd").forEach((dd, i) => (tile[i].dd = dd));
  }
  rows.forEach(([name, value, note], i) => {
    set(tile[i].dt, name);
    set(tile[i].dd, value);
    set(tile[i].small, note);
  });
}

function lostText() {
  const r = view.recoveries;
  const failed = r ? r.failed.reduce((a, b) => a + b, 0) : 0;
  return failed === 1 ? "1 after a failure" : failed + " after failures";
}

// spent tells whether it is known what the job's time was spent on: of a command without hvdrun's
// library it is not.
const spent = () => view.goodput.seconds > 0 && (view.job.generation > 0 || view.goodput.parts.some((p) => p.part === "training" && p.seconds > 0));

// world makes the elements of all hosts and slots.
function world() {
  cells = [];
  places = [];
  byId("world").classList.toggle("dense", view.slots.length > 160);
  const hosts = view.hosts.map((host) => {
    const notes = [host.draining && "drains", !host.listed && "not listed"].filter(Boolean).join(", ");
    const slots = host.slots.map((n) => {
      const i = cells.length;
      places.push({ host: host.host, slot: n });
      const c = h("button.slot", { type: "button", tabIndex: -1, onclick: () => choose(i) });
      cells.push(c);
      return c;
    });
    return h("div.host" + (host.listed ? "" : ".gone"), null,
      h("div.host-name", null, h("button", { type: "button", title: "The whole host " + clean(host.host), onclick: () => chooseHost(host.host) }, host.host), h("span.note", null, notes)),
      h("div.slots", null, slots.length ? slots : h("span.note", null, "no slots")));
  });
  fill(byId("hosts"), hosts.length ? hosts : h("p.empty", null, "No hosts yet: discovery has named none."));
  cells.forEach((_, i) => cell(i));
  const at = index(picked);
  if (cells.length) cells[Math.max(0, at)].tabIndex = 0;
}

const index = (k) => places.findIndex((p) => key(p.host, p.slot) === k);

function cell(i) {
  const c = cells[i], s = view.slots[i], p = places[i];
  if (!c || !s) return;
  const on = key(p.host, p.slot) === picked;
  const name = `slot s-${s.state in words ? s.state : "free"}${on ? " selected" : ""}${s.where ? " hung" : s.late ? " slow" : ""}`;
  if (c.className !== name) c.className = name;
  set(c, s.state === "training" && s.rank != null ? String(s.rank) : mark[s.state] ?? "");
  const title = `${p.host}:${p.slot} – ${words[s.state] ?? s.state}${s.rank == null ? "" : ", rank " + s.rank}${s.where ? ", holds up the others" : s.late ? ", a straggler" : ""}`;
  if (c.title !== title) {
    c.title = clean(title);
    c.setAttribute("aria-label", clean(title));
  }
}

function legend() {
  const counts = {};
  for (const s of view.slots) counts[s.state] = (counts[s.state] ?? 0) + 1;
  const hung = view.slots.filter((s) => s.where).length;
  fill(byId("legend"), ...Object.keys(words).filter((w) => counts[w]).map((w) =>
    h("li", null, h("span.swatch.s-" + w), h("b", null, number(counts[w])), words[w])),
  hung ? h("li", null, h("span.swatch.hung"), h("b", null, number(hung)), hung === 1 ? "of them holds up the others" : "of them hold up the others") : null,
  view.hosts.length ? h("li", null, `on ${number(view.hosts.length)} ${view.hosts.length === 1 ? "host" : "hosts"}, oldest first`) : null);
}

function arrows(e) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
  const i = cells.indexOf(e.target);
  if (i < 0) return;
  let to = step ? i + step : -1;
  if (e.key === "ArrowDown" || e.key === "ArrowUp") {
    const b = e.target.getBoundingClientRect(), down = e.key === "ArrowDown";
    let best = Infinity;
    cells.forEach((c, n) => {
      const r = c.getBoundingClientRect(), dy = down ? r.top - b.top : b.top - r.top;
      const score = dy * 3 + Math.abs(r.left - b.left);
      if (dy > 3 && score < best) [best, to] = [score, n];
    });
  }
  if (to < 0 || to >= cells.length) return;
  e.preventDefault();
  choose(to, true);
}

export function choose(i, focus) {
  const before = index(picked);
  picked = i < 0 ? "" : key(places[i].host, places[i].slot);
  if (before >= 0) {
    cells[before].tabIndex = -1;
    cell(before);
  }
  if (i >= 0) {
    cells.forEach((c) => c.tabIndex === 0 && (c.tabIndex = -1));
    cells[i].tabIndex = 0;
    cell(i);
    if (focus) cells[i].focus();
    else if (innerWidth <= 1080) byId("selected").scrollIntoView({ block: "nearest", behavior: "smooth" });
  }
  redraw("pick");
}

function chooseHost(host) {
  choose(-1);
  picked = key(host, "*");
  if (innerWidth <= 1080) byId("selected").scrollIntoView({ block: "nearest", behavior: "smooth" });
  redraw("pick");
}

// chosen is the host and slot that commands of keys are for; slot is null for a whole host.
export function chosen() {
  if (!picked) return null;
  const [host, slot] = picked.split("\n");
  return { host, slot: slot === "*" ? null : Number(slot) };
}

const fact = (name, value) => (value === "" || value == null ? [] : [h("dt", null, name), h("dd", null, value)]);

let slotKey = "";
function slot() {
  const at = chosen(), box = byId("slot");
  if (!at || (at.slot == null ? !view.hosts.some((x) => x.host === at.host) : index(picked) < 0)) {
    slotKey = "";
    set(byId("selected-title"), "Slot");
    return fill(box, h("p.empty", null, at ? "It is gone." : "Choose a slot, or the name of a host."));
  }
  const whole = at.slot == null, list = [];
  let busy = true, out = false;
  if (whole) {
    const n = places.map((p, i) => i).filter((i) => places[i].host === at.host), host = view.hosts.find((x) => x.host === at.host);
    const training = n.filter((i) => view.slots[i].state === "training").length;
    out = n.some((i) => view.slots[i].out);
    list.push(fact("Slots", String(n.length)), fact("Training", String(training)), fact("Failures", String(n.reduce((s, i) => s + view.slots[i].failures, 0))),
      fact("Listed", host.listed ? "yes" : "no, not any more"), fact("Drains", host.draining ? "yes, says discovery" : ""));
  } else {
    const i = index(picked), s = view.slots[i];
    busy = !s.out;
    out = !!s.out;
    const until = s.out && s.until ? `until ${clock(s.until, view.now)}` : s.out ? "until it is readmitted" : "";
    list.push(fact("State", words[s.state] ?? s.state), fact(s.out ? (s.out === s.state ? "Out" : words[s.out] ?? s.out) : "", until), fact("Rank", s.rank == null ? "none" : String(s.rank)),
      fact("Commit", view.commits[i] == null ? "unknown" : number(view.commits[i])), fact("Process", s.pid ? String(s.pid) : "none"),
      fact("Failures", number(s.failures)));
    if (s.straggler) list.push(fact("Comes last", `${(100 * s.straggler.last).toFixed(0)} % of ${number(s.straggler.operations)}, by ${duration(s.straggler.by_seconds)}`));
    const u = s.usage;
    if (u) list.push(fact("Processors", u.processors.toFixed(1)), fact("Memory", bytes(u.resident_bytes)),
      fact(u.memory_used_bytes > 0.9 * u.memory_limit_bytes ? "Memory is short" : "", `${bytes(Math.max(0, u.memory_limit_bytes - u.memory_used_bytes))} of ${bytes(u.memory_limit_bytes)} left`));
    for (const f of s.figures ?? []) list.push(fact(f.name, f.value == null ? "not a number" : String(+f.value.toPrecision(6))));
    if (s.what) list.push([h("dt", null, "Does"), h("dd.long", null, s.what)]);
    if (s.where) list.push([h("dt", null, "Is at"), h("dd.long.mono", null, s.where)]);
  }
  const cannot = act.why(), next = JSON.stringify([picked, cannot, busy, out, list.flat().map((e) => e.textContent)]);
  if (next === slotKey) return;
  const focused = document.activeElement?.closest?.("#slot")?.contains(document.activeElement) ? document.activeElement.dataset.verb : "";
  slotKey = next;
  set(byId("selected-title"), whole ? "Host " + at.host : `Slot ${at.host}:${at.slot}`);
  const button = (verb, text, f, show, danger) => show && h("button" + (danger ? ".danger" : ""), {
    type: "button", disabled: cannot !== "", title: cannot ? "Not now: " + cannot : "", "data-verb": verb, onclick: () => f(at.host, at.slot),
  }, text);
  fill(box, h("dl.slot-facts", null, ...list.flat()), h("div.buttons", null,
    view.write && button("drain", "Drain…", act.drain, whole || busy), view.write && button("exclude", "Exclude…", act.exclude, whole || busy, true),
    view.write && button("readmit", "Readmit…", act.readmit, out),
    !whole && view.slots[index(picked)].rank != null && h("button", { type: "button", "data-verb": "output", onclick: showOutput }, "Output")));
  if (focused) box.querySelector(`[data-verb="${focused}"]`)?.focus();
}

function ranks() {
  const rows = view.slots.map((s, i) => i).filter((i) => view.slots[i].pid || view.slots[i].rank != null);
  rows.sort((a, b) => (view.slots[a].rank ?? 1e9) - (view.slots[b].rank ?? 1e9) || a - b);
  if (!rows.length) return fill(byId("ranks"), h("p.empty", null, "No workers at the moment."));
  const row = (i) => {
    const s = view.slots[i], p = places[i];
    return h("tr.pick", { onclick: () => choose(i) }, h("td.n", null, s.rank == null ? "–" : String(s.rank)), h("td.nowrap", null, `${p.host}:${p.slot}`),
      h("td.nowrap", null, h("span.chip", null, h("span.swatch.s-" + (s.state in words ? s.state : "free")), words[s.state] ?? s.state)),
      h("td.n", null, view.commits[i] == null ? "–" : number(view.commits[i])), h("td.n", null, s.pid ? String(s.pid) : "–"),
      h("td.n", null, String(s.failures)), h("td.n", null, s.straggler ? (100 * s.straggler.last).toFixed(0) + " %" : "–"), h("td.text", null, s.what ?? "", s.where ? h("div.note.mono", null, s.where) : null));
  };
  fill(byId("ranks"), h("table", null, h("thead", null, h("tr", null, h("th.n", null, "Rank"), h("th", null, "Slot"), h("th", null, "State"), h("th.n", null, "Commit"),
    h("th.n", null, "Process"), h("th.n", null, "Failures"), h("th.n", { title: "How often it comes last" }, "Last"), h("th", null, "Does"))),
  h("tbody", null, rows.slice(0, rankLimit).map(row))),
  rows.length > rankLimit && h("button.more", { type: "button", onclick: () => { rankLimit += 200; redraw("ranks"); } }, `Show more of ${number(rows.length)}`));
}

// figures draws the numbers that rank 0 reports, each as a curve of its own.
function figures(from, to) {
  const box = byId("figures"), names = Object.keys(view.curves).filter((n) => view.curves[n].length > 1).sort();
  if (box.dataset.names !== names.join()) {
    box.dataset.names = names.join();
    fill(box, names.map((n) => [h("h3.chart-title", null, n), h("div.chart")]));
  }
  names.forEach((name, i) => {
    const points = view.curves[name].filter((p) => p[0] <= to + 1000), place = box.children[2 * i + 1];
    if (!points.length) return;
    chart.hover(place, chart.figure(place, points, from, to, `${name} over time, now ${points[points.length - 1][1]}`), from, to, (t) => {
      const p = t == null ? null : points.find((x) => x[0] >= t);
      set(byId("hover"), p ? `${clock(p[0], view.now)} · ${name} ${+p[1].toPrecision(6)}` : "");
    });
  });
}

let drawn = "";
function charts() {
  const j = view.job, size = byId("chart-size"), rate = byId("chart-rate");
  const from = Date.parse(j.begun);
  const to = Math.max(ended() || !j.driver_pid ? Date.parse(j.last_event) : view.now, from + 1000);
  const is = [from, to, size.clientWidth, view.worlds.length, view.worlds.at(-1)?.generation, view.points.length, ...Object.values(view.curves).map((c) => c.length)].join();
  if (is === drawn || !size.clientWidth) return;
  drawn = is;
  const begin = (w) => Date.parse(w.time);
  if (!view.worlds.length) fill(size, h("p.empty", null, "No world yet."));
  else {
    const worlds = view.worlds.filter((w) => begin(w) <= to);
    chart.hover(size, chart.sizes(size, worlds, from, to, `Workers over time: ${worlds.length} generations, now ${j.size}`), from, to, (t) => {
      const w = t == null ? null : worlds.findLast((x) => begin(x) <= t);
      set(byId("hover"), w ? `${clock(t, view.now)} · generation ${w.generation}, ${w.size} workers` : "");
    });
  }
  if (view.points.length < 2) fill(rate, h("p.empty", null, ended() ? "Nobody watched the job’s commits." : "Comes with the first commits."));
  else {
    const points = view.points.filter((p) => p[0] <= to + 1000);
    chart.hover(rate, chart.rates(rate, points, from, to, "Commits per second over time"), from, to, (t) => {
      const p = t == null ? null : points.find((x) => x[0] >= t);
      set(byId("hover"), p ? `${clock(p[0], view.now)} · ${rateText(p[1])} commits per second` : "");
    });
  }
  figures(from, to);
  const seen = [...new Set(view.worlds.map((w) => w.kind))];
  fill(byId("kinds"), ...seen.map((k) => h("li", null, dot(k), kinds[k] ?? k)));
}

function worlds() {
  const all = view.worlds, box = byId("worlds");
  set(byId("generations-note"), view.forgotten ? `the last ${number(all.length)}; ${number(view.forgotten)} before them are in the events file` : "");
  if (!all.length) return fill(box, h("p.empty", null, "The first begins when enough workers have joined."));
  const rows = all.slice(-worldLimit).reverse().map((w, i) => {
    const n = all.length - 1 - i, before = n > 0 ? all[n - 1].size : null, d = before == null ? 0 : w.size - before;
    return h("tr", null, h("td.n", null, number(w.generation)), h("td.time", null, clock(w.time, view.now)),
      h("td.n", null, number(w.size) + (d ? ` (${d > 0 ? "+" : "−"}${Math.abs(d)})` : "")),
      h("td.nowrap", null, h("span.chip", null, dot(w.kind), kinds[w.kind] ?? w.kind)), h("td.n", null, w.first ? duration(w.lost) : "–"), h("td.text", null, w.why));
  });
  fill(box, h("table", null, h("thead", null, h("tr", null, h("th.n", null, "No."), h("th", null, "Published"), h("th.n", null, "Workers"), h("th", null, "Cause"),
    h("th.n", { title: "From the cause to the first commit" }, "Took"), h("th", null, "Why"))), h("tbody", null, rows)),
  all.length > worldLimit && h("button.more", { type: "button", onclick: () => { worldLimit += 100; redraw("more"); } }, `Show more of ${number(all.length)}`));
}

function parts() {
  const box = byId("parts"), g = view.goodput;
  if (!spent()) return fill(box, h("p.empty", null, "Nothing has happened yet."));
  const some = g.parts.filter((p) => p.seconds > 0);
  const swatch = (p, name) => {
    const e = h(name ?? "span.swatch", { title: clean(p.part) });
    e.style.background = p.part === "training" ? "var(--p-training)" : `var(--p-${g.parts.indexOf(p)})`;
    return e;
  };
  const bar = some.map((p) => {
    const e = swatch(p, "span");
    e.style.flexGrow = p.seconds / g.seconds;
    return e;
  });
  fill(box, h("div.share", { "aria-hidden": "true" }, bar), h("div.parts", null, some.map((p) => [swatch(p), h("span", null, p.part),
    h("span.n", null, duration(p.seconds)), h("span.note", null, ((100 * p.seconds) / g.seconds).toFixed(1) + " %")]).flat()),
  g.stalled_by?.length && h("p.note", null, "Stalled by ", g.stalled_by.map((b) => `${b.host}:${b.slot} (${duration(b.seconds)})`).join(", ")));
}

function recoveries() {
  const r = view.recoveries, box = byId("recoveries");
  const most = r ? Math.max(...r.failed.map((f, i) => f + r.planned[i])) : 0;
  if (!most) return fill(box, h("p.empty", null, "No reset so far."));
  const both = r.failed.map((f, i) => f + r.planned[i]);
  const first = both.findIndex((n) => n > 0), lastBar = both.findLastIndex((n) => n > 0);
  const rows = [];
  for (let i = Math.max(0, first - 1); i <= Math.min(both.length - 1, lastBar + 1); i++) {
    const name = i < r.steps.length ? "≤ " + duration(r.steps[i]) : "> " + duration(r.steps.at(-1));
    const piece = (cls, n) => {
      if (!n) return null;
      const e = h("span." + cls);
      e.style.width = `${(100 * n) / most}%`;
      return e;
    };
    rows.push(h("span.n", null, name), h("span.track", null, piece("fail", r.failed[i]), piece("plan", r.planned[i])), h("span.n", null, both[i] ? number(both[i]) : ""));
  }
  fill(box, h("div.bars", null, rows), h("ul.legend", null, h("li", null, h("span.swatch.fail"), "after a failure or stall"), h("li", null, h("span.swatch.plan"), "planned")));
}

function stragglers() {
  const box = byId("stragglers");
  const all = view.slots.map((s, i) => ({ s, i })).filter((x) => x.s.straggler && x.s.straggler.operations > 0);
  if (!all.length) return fill(box, h("p.empty", null, "No rank is known to come last."));
  all.sort((a, b) => b.s.straggler.last - a.s.straggler.last);
  const top = all.filter((x) => x.s.late).slice(0, 8);
  if (!top.length) return fill(box, h("p.empty", null, "No rank comes last more often than the others."));
  fill(box, h("table", null, h("thead", null, h("tr", null, h("th.n", null, "Rank"), h("th", null, "Slot"), h("th.n", null, "Last"), h("th.n", null, "By"))),
    h("tbody", null, top.map(({ s, i }) => h("tr.pick", { onclick: () => choose(i) }, h("td.n", null, s.rank == null ? "–" : String(s.rank)),
      h("td", null, `${places[i]?.host}:${places[i]?.slot}`), h("td.n", null, (100 * s.straggler.last).toFixed(0) + " %"), h("td.n", null, duration(s.straggler.by_seconds)))))));
}

function tasks() {
  const t = view.tasks, some = t && ((t.functions ?? []).length || (t.workers ?? []).length);
  byId("work").hidden = !some;
  if (!some) return;
  set(byId("tasks-note"), `${number(t.running ?? 0)} running, ${number(t.ready ?? 0)} ready, ${number(t.waiting ?? 0)} waiting`);
  fill(byId("tasks"), h("table", null, h("thead", null, h("tr", null, h("th", null, "Function"), h("th.n", null, "Running"), h("th.n", null, "Ready"), h("th.n", null, "Takes"))),
    h("tbody", null, (t.functions ?? []).slice(0, 50).map((f) => h("tr", null, h("td.text", null, f.function, f.why ? h("div.note", null, f.why) : null),
      h("td.n", null, number(f.running ?? 0)), h("td.n", null, number(f.ready ?? 0)), h("td.n", null, f.pace_us ? duration(f.pace_us / 1e6) : "–"))))));
}

function events() {
  const most = 300, text = byId("filter").value.trim().toLowerCase(), kind = byId("kind").value;
  const found = [];
  let n = 0;
  for (let i = view.events.length - 1; i >= 0; i--) {
    const e = view.events[i];
    if (e.folded && !kind && !text) continue;
    if (kind && e.kind !== kind) continue;
    if (text && !(e.text + " " + e.name).toLowerCase().includes(text)) continue;
    if (n++ < most) found.push(e);
  }
  fill(byId("events"), ...found.map((e) => h("li", null, h("time", { dateTime: e.time, title: e.time }, clock(e.time, view.now)), dot(e.kind),
    h("span.name", null, e.name.replaceAll("_", " ")), h("span.words", null, e.text))));
  if (!view.events.length) fill(byId("events"), h("li.empty", null, "Nothing has happened yet."));
  else if (!found.length) fill(byId("events"), h("li.empty", null, "No event is like that."));
  set(byId("events-note"), n > most ? `the newest ${most} of ${number(n)}` : "");
}

// The output of one rank: its end at first, then what is added.
let out = { stream: "stdout", to: null, of: "", text: "" }, asking = false, wanted = false;

function choosing(stream) {
  out.stream = stream;
  byId("out-stdout").setAttribute("aria-pressed", stream === "stdout");
  byId("out-stderr").setAttribute("aria-pressed", stream === "stderr");
  output(true);
}

export function showOutput() {
  const i = index(picked), rank = i >= 0 ? view.slots[i].rank : null;
  if (rank != null) byId("output-rank").value = rank;
  output(true);
  byId("output").scrollIntoView({ block: "start", behavior: "smooth" });
  byId("text").focus({ preventScroll: true });
}

// plain leaves out what commands a terminal: colours, moves of the cursor, titles.
const plain = (text) => text.replace(/\u001b\[[0-?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(\u0007|\u001b\\)|\u001b[@-Z\\-_]/g, "").replace(/\r\n/g, "\n").replace(/[^\n]*\r(?=[^\n])/g, "");

async function output(anew) {
  wanted ||= anew;
  const note = byId("output-note");
  if (asking || !view.job || document.hidden) return;
  if (!view.job.output) {
    set(note, "hvdrun does not keep the output of this job. A job that runs with --output-filename DIR shows it here.");
    return;
  }
  const rank = byId("output-rank").value, of = rank + out.stream;
  const box = byId("text"), b = box.getBoundingClientRect();
  if (!wanted && (b.bottom < 0 || b.top > innerHeight)) return; // nobody sees it
  if (rank === "") return;
  wanted = false;
  if (of !== out.of) out = { stream: out.stream, to: null, of, text: "" };
  asking = true;
  try {
    const answer = await fetch(`/api/output?rank=${encodeURIComponent(rank)}&stream=${out.stream}${out.to == null ? "" : "&from=" + out.to}`);
    const got = await answer.json();
    if (of !== byId("output-rank").value + out.stream) {
      wanted = true;
      return;
    }
    if (!answer.ok) {
      set(box, "");
      out.of = "";
      return set(note, got.error);
    }
    const end = box.scrollHeight - box.scrollTop - box.clientHeight < 30 || out.to == null;
    if (out.to == null || got.from !== out.to) out.text = "";
    out.text = (out.text + got.text).slice(-131072);
    out.to = got.to;
    set(box, plain(out.text));
    set(note, got.size ? `the end of ${number(got.size)} bytes; more is added as it comes` : "this rank has printed nothing");
    if (end) box.scrollTop = box.scrollHeight;
  } catch { /* the next time */ } finally {
    asking = false;
  }
}
