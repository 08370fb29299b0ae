// What the user has said: a bubble that can be turned into a field, changed, and sent again.
import { copyButton } from "./copy.js";
import { make } from "./dom.js";

export class Question {
  /** `onEdit` is called with the new text. */
  constructor(content, onEdit) {
    this.content = content;
    this.onEdit = onEdit;
    const name = "Edit your message";
    const edit = { type: "button", class: "action edit", "aria-label": name, title: name, text: "Edit" };
    this.button = make("button", { ...edit, onclick: () => this.#open() });
    this.element = make("article", { class: "message user", "aria-label": "You" });
    this.#close();
  }

  kept() {
    return { role: "user", content: this.content };
  }

  #close() {
    this.element.replaceChildren(
      make("div", { class: "text", text: this.content }),
      make("div", { class: "foot" }, make("div", { class: "actions" }, copyButton("Copy your message", () => this.content), this.button)),
    );
  }

  #open() {
    const field = make("textarea", { rows: "3", "aria-label": "Your message, to change" });
    field.value = this.content;
    const cancel = () => {
      this.#close();
      this.button.focus();
    };
    const send = () => field.value.trim() && this.onEdit(field.value.trim());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    this.element.replaceChildren(
      field,
      make(
        "div",
        { class: "buttons" },
        make("button", { type: "button", class: "quiet", text: "Cancel", onclick: cancel }),
        make("button", { type: "button", text: "Send again", onclick: send }),
      ),
    );
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}
