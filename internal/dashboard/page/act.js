// What a person may ask of the job: each command asks first. Keys are here too.
import { byId, h, fill, set, clean } from "./h.js";
import * as draw from "./draw.js";

let view;

export function toast(text) {
  const t = h("div.toast", null, text);
  byId("toasts").append(t);
  setTimeout(() => t.remove(), 7000);
}

async function send(order) {
  let answer, body = {};
  try {
    answer = await fetch("/api/command", {
      method: "POST", headers: { "Content-Type": "application/json", "X-Hvdrun-Proof": view.proof }, body: JSON.stringify(order),
    });
    body = await answer.json();
  } catch (e) {
    if (!answer) return { error: "no answer: " + e.message };
  }
  return answer.ok ? { done: body.done } : { error: body.error ?? answer.statusText };
}

// why says why commands cannot be given; "" where they can.
export function why() {
  const j = view.job;
  if (!view.write) return "this page is for watching only";
  if (!j) return "the job is not known yet";
  return view.live ? j.cannot : "the page has no connection";
}

// ask shows a dialog; order is called for the command when it is confirmed. The dialog stays open
// with the reason if the job refuses.
function ask({ title, body, yes, danger, order }) {
  const cannot = why();
  if (cannot) return toast("Nothing is done: " + cannot);
  const dialog = byId("ask"), ok = byId("ask-yes");
  set(byId("ask-title"), title);
  fill(byId("ask-body"), ...body);
  set(byId("ask-error"), "");
  set(ok, yes);
  ok.className = danger ? "primary danger" : "primary";
  ok.disabled = false;
  byId("ask-form").onsubmit = async (e) => {
    e.preventDefault();
    let command;
    try {
      command = order();
    } catch (wrong) {
      return set(byId("ask-error"), wrong.message);
    }
    ok.disabled = true;
    const answer = await send(command);
    ok.disabled = false;
    if (answer.error) return set(byId("ask-error"), answer.error);
    dialog.close();
    toast(answer.done);
  };
  dialog.showModal();
  (byId("ask-body").querySelector("input") ?? byId("ask-no")).focus();
}

const place = (host, slot) => (slot == null ? host : `${host}:${slot}`);

export function drain(host, slot) {
  ask({
    title: `Drain ${place(host, slot)}?`, yes: "Drain",
    body: [h("p", null, slot == null ? "All its workers leave at the next commit." : "Its worker leaves at the next commit.", " No step is lost."),
      h("p.note", null, "No worker is started there until it is readmitted.")],
    order: () => ({ verb: "drain", host, slot }),
  });
}

export function exclude(host, slot) {
  const minutes = h("input", { type: "number", id: "for", min: "0", step: "any", placeholder: "∞" });
  ask({
    title: `Exclude ${place(host, slot)}?`, yes: "Exclude", danger: true,
    body: [h("p", null, slot == null ? "Its workers are stopped at once." : "Its worker is stopped at once.", " The others go back to their last commit."),
      h("p.note", null, "Drain is the gentle way."),
      h("label.field", null, "For how many minutes (none: until it is readmitted)", minutes)],
    order: () => {
      const m = minutes.value.trim() === "" ? 0 : Number(minutes.value);
      if (!(m >= 0) || minutes.validity.badInput) throw new Error("That is no number of minutes.");
      return { verb: "exclude", host, slot, for: m * 60 };
    },
  });
}

export function readmit(host, slot) {
  ask({
    title: `Use ${place(host, slot)} again?`, yes: "Readmit",
    body: [h("p", null, "Drains and exclusions there end, and failures are forgotten. Workers are started there if there is room.")],
    order: () => ({ verb: "readmit", host, slot }),
  });
}

export function scale() {
  const j = view.job;
  const least = h("input", { type: "number", id: "min-np", min: "1", value: String(j?.min_np ?? "") });
  const most = h("input", { type: "number", id: "max-np", min: "1", placeholder: "no bound", value: j?.max_np ? String(j.max_np) : "" });
  const count = (e, none) => {
    if (e.value.trim() === "" && !e.validity.badInput) {
      if (none != null) return none;
      throw new Error("The fewest workers are missing.");
    }
    const n = Number(e.value);
    if (!Number.isInteger(n) || n < 1) throw new Error("A number of workers is at least 1.");
    return n;
  };
  ask({
    title: "How many workers?", yes: "Scale",
    body: [h("p", null, `There are ${j?.size ?? 0}. With more than the most, the youngest leave at the next commit; where there are slots for more, workers are started at once.`),
      h("label.field", null, "Fewest with which training goes on", least), h("label.field", null, "Most (none: no bound)", most)],
    order: () => ({ verb: "scale", min_np: count(least), max_np: count(most, 0) }),
  });
}

export function stop() {
  const now = h("input", { type: "checkbox", id: "now" });
  ask({
    title: `Stop job ${clean(view.job?.job)}?`, yes: "Stop the job", danger: true,
    body: [h("p", null, "Workers in training leave at a step boundary and write the last checkpoint, if the program writes any. The job ends, and cannot be resumed."),
      h("label.check", null, now, "Kill the workers at once, without a last checkpoint")],
    order: () => ({ verb: "stop", now: now.checked }),
  });
}

const themes = ["", "light", "dark"], names = { "": "Auto", light: "Light", dark: "Dark" };
function theme(step) {
  const root = document.documentElement;
  let is = root.dataset.theme ?? "";
  if (step) {
    is = themes[(themes.indexOf(is) + 1) % themes.length];
    if (is) root.dataset.theme = is;
    else delete root.dataset.theme;
    try {
      if (is) localStorage.setItem("theme", is);
      else localStorage.removeItem("theme");
    } catch { /* a browser that keeps nothing */ }
  }
  set(byId("theme"), names[is]);
  byId("theme").setAttribute("aria-label", "Colours: " + names[is]);
}

// keys act outside of fields, and while no dialog is open.
function key(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]")) return;
  const inField = /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName);
  if (inField) {
    if (e.key === "Escape") e.target.blur();
    return;
  }
  const at = draw.chosen();
  const keys = {
    "/": () => byId("filter").focus(), "?": () => byId("keys").showModal(), t: () => theme(true), s: scale, o: draw.showOutput,
    d: () => at && drain(at.host, at.slot), x: () => at && exclude(at.host, at.slot), r: () => at && readmit(at.host, at.slot),
    Escape: () => draw.choose(-1),
  };
  const f = keys[e.key];
  if (!f) return;
  e.preventDefault();
  f();
}

export function begin(v) {
  view = v;
  theme(false);
  byId("theme").addEventListener("click", () => theme(true));
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("scale").addEventListener("click", scale);
  byId("stop").addEventListener("click", stop);
  byId("ask-no").addEventListener("click", () => byId("ask").close());
  document.addEventListener("keydown", key);
}
