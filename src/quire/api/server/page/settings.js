// The chat's settings: a form that remembers, and what of it goes into a request.
import { $, make } from "./dom.js";

const KEY = "quire-settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "repetition_penalty", "top_k"];

export function startSettings() {
  const form = $("settings");
  const button = $("settings-button");
  restore(form);
  form.addEventListener("input", () => keep(form));
  form.addEventListener("reset", () => setTimeout(() => keep(form)));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") toggle(form, button, false);
  });
  button.addEventListener("click", () => toggle(form, button, form.hidden));
}

function toggle(form, button, open) {
  form.hidden = !open;
  button.setAttribute("aria-expanded", String(open));
  if (open) form.elements[0].focus();
  else button.focus();
}

/** Where several models or adapters are served, the form has a choice of them. */
export function offerModels(names) {
  const { model } = $("settings").elements;
  model.replaceChildren(...names.map((name) => make("option", { text: name })));
  const chosen = kept().model;
  if (names.includes(chosen)) model.value = chosen;
  $("models").hidden = names.length < 2;
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {}; // written by another page
  }
}

function restore(form) {
  for (const [name, value] of Object.entries(kept())) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  show(form);
}

function keep(form) {
  localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(new FormData(form))));
  show(form);
}

function show(form) {
  for (const output of form.querySelectorAll("output")) {
    output.value = form.elements[output.htmlFor[0]].value;
  }
}

/** What was set, as fields of a request; what was left empty is the server's to choose. */
export function settings() {
  const form = $("settings");
  const asked = {};
  for (const name of NUMBERS) {
    const { value } = form.elements[name];
    if (value !== "") asked[name] = Number(value);
  }
  if (!$("models").hidden) asked.model = form.elements.model.value;
  return { system: form.elements.system.value.trim(), asked };
}
