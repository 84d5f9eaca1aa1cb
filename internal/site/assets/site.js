"use strict";
// The search over all pages and the buttons that copy blocks. Without it the site can still be read.

const root = document.documentElement.dataset.root;
const input = document.getElementById("search");
const hits = document.getElementById("hits");
const found = document.getElementById("found");

// The index is a script, since a page that was opened as a file may not fetch others. It is brought
// when somebody turns to the search.
let index = null, asked = false, enter = false; // enter: the key was pressed before the index was there
function bringIndex() {
  if (asked) return;
  asked = true;
  const script = document.createElement("script");
  script.src = root + "search-index.js";
  script.onload = () => {
    index = window.hvdrunIndex;
    for (const s of index.sections) {
      s.title = index.pages[s.page].title.toLowerCase();
      s.head = s.heading.toLowerCase();
      s.low = s.text.toLowerCase();
    }
    if (!input.value) return;
    show();
    if (enter) follow();
  };
  script.onerror = () => {
    asked = false;
    enter = false;
    found.textContent = "The index of the search could not be loaded.";
    found.classList.remove("hidden");
  };
  document.head.append(script);
}

// A section is found if it has all words. Words in headings count more than words in the text, and
// whole words more than beginnings.
function search(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const out = [];
  for (const s of index.sections) {
    let score = 0;
    for (const w of words) {
      const here = 12 * weight(s.head, w) + 8 * weight(s.title, w) + Math.min(6, count(s.low, w));
      if (!here) { score = 0; break; }
      score += here;
    }
    if (score) out.push({ s, score });
  }
  out.sort((a, b) => b.score - a.score); // stable: equal ones stay in the order of the pages
  return out.slice(0, 20).map((o) => o.s);
}

function weight(text, word) {
  const i = text.indexOf(word);
  if (i < 0) return 0;
  const letter = /[\p{L}\p{N}]/u;
  const begins = i === 0 || !letter.test(text[i - 1]);
  const ends = i + word.length === text.length || !letter.test(text[i + word.length]);
  return begins && ends ? 2 : begins ? 1 : 0.5;
}

function count(text, word) {
  let n = 0;
  for (let i = text.indexOf(word); i >= 0 && n < 6; i = text.indexOf(word, i + word.length)) n++;
  return n;
}

// excerpt appends the text around the first word that occurs, with that word marked.
function excerpt(to, s, words) {
  let at = -1, word = "";
  for (const w of words) {
    const i = s.low.indexOf(w);
    if (i >= 0 && (at < 0 || i < at)) { at = i; word = w; }
  }
  if (at < 0) { to.append(s.text.slice(0, 120)); return; }
  const from = Math.max(0, at - 50);
  const mark = document.createElement("mark");
  mark.textContent = s.text.slice(at, at + word.length);
  to.append((from ? "…" : "") + s.text.slice(from, at), mark, s.text.slice(at + word.length, at + word.length + 90) + "…");
}

function show() {
  if (!index) return;
  const list = search(input.value);
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  hits.replaceChildren();
  for (const s of list) {
    const page = index.pages[s.page];
    const a = document.createElement("a");
    a.href = root + page.url + (s.anchor ? "#" + s.anchor : "");
    const title = document.createElement("b");
    title.textContent = s.heading;
    const text = document.createElement("small");
    excerpt(text, s, words);
    a.append(title, s.heading === page.title ? "" : " · " + page.title, text);
    a.addEventListener("click", close);
    const item = document.createElement("li");
    item.append(a);
    hits.append(item);
  }
  hits.hidden = !list.length;
  found.classList.toggle("hidden", !!list.length || !words.length);
  found.textContent = !words.length ? "" : list.length ? list.length + (list.length === 20 ? " or more" : "") + " found" : "Nothing found";
}

// follow goes to the first hit, now or when the index is there. The hits are always those of what the
// input holds.
function follow() {
  enter = !index;
  hits.querySelector("a")?.click();
}

function close() {
  enter = false;
  hits.hidden = true;
  found.classList.add("hidden");
}

// move puts the focus on another hit, or back on the input.
function move(by) {
  const all = [input, ...hits.querySelectorAll("a")];
  const to = all.indexOf(document.activeElement) + by;
  if (to >= 0 && to < all.length) all[to].focus();
}

document.querySelector(".search").hidden = false;
input.addEventListener("focus", () => { bringIndex(); if (hits.children.length) hits.hidden = false; });
input.addEventListener("input", () => { enter = false; bringIndex(); show(); });
document.querySelector(".search").addEventListener("keydown", (e) => {
  if (e.key === "ArrowDown") move(1);
  else if (e.key === "ArrowUp") move(-1);
  else if (e.key === "Escape") { input.focus(); close(); } // in this order: the focus shows the hits
  else if (e.key === "Enter" && e.target === input) follow();
  else return;
  if (e.key !== "Enter" || e.target === input) e.preventDefault();
});
document.addEventListener("keydown", (e) => {
  if (e.key === "/" && !e.ctrlKey && !e.metaKey && !e.altKey && document.activeElement !== input) {
    e.preventDefault();
    input.focus();
  }
});
document.addEventListener("click", (e) => { if (!e.target.closest(".search")) close(); });

// copy copies a text where the browser has a clipboard for pages, and otherwise by its selection.
async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    const range = document.createRange();
    range.selectNodeContents(code);
    const selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    return document.execCommand("copy");
  }
}

for (const pre of document.querySelectorAll("main pre")) {
  const block = document.createElement("div");
  block.className = "block";
  pre.replaceWith(block);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(pre.querySelector("code"))) ? "Copied" : "Press Ctrl-C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  block.append(pre, button);
}
