// Light, dark, or as the system has it.
import { $ } from "./dom.js";
import { changed } from "./colours.js";

const KEY = "quire-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const MARKS = { system: "◐", light: "○", dark: "●" };

function apply(theme) {
  const root = document.documentElement;
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  const button = $("theme");
  button.textContent = MARKS[theme];
  const says = theme === "system" ? "as the system has them" : theme;
  button.setAttribute("aria-label", `Colours: ${says}`);
  button.title = `Colours: ${says}`;
  localStorage.setItem(KEY, theme);
  changed();
}

export function startTheme() {
  const kept = localStorage.getItem(KEY);
  apply(kept in NEXT ? kept : "system");
  $("theme").addEventListener("click", () => apply(NEXT[localStorage.getItem(KEY)]));
}
