// One request's story in words.
import { count, plural, seconds } from "./dom.js";

const PLACES = { device: "the device", host: "host memory", ssd: "the SSD", remote: "the remote store" };

function places(tokens) {
  return Object.entries(tokens).map(([tier, number]) => `${count(number)} in ${PLACES[tier] ?? tier}`).join(", ");
}

const SAY = {
  queued: (event) => `${plural(event.tokens, "prompt token")}`,
  matched: (event, story) => found(event, story),
  resumed: (event, story) => found(event, story),
  loaded: (event) => [places(event.tiers ?? {}) || "nothing came", event.missed].filter(Boolean).join("; "),
  prefill: (event) => `${plural(event.tokens, "token")} computed`,
  "first token": (event) => `${seconds(event.at)} after it came`,
  decode: (event) => `${plural(event.tokens, "token")} more`,
  forked: (event) => `sample ${event.sample + 1} ${event.shared ? "shares the prompt's blocks" : "waits for a place"}`,
  copied: () => "its last block was shared: it writes into a copy",
  preempted: () => "others needed its blocks or its slot",
  "taken back": () => "the step failed: it waits again",
  finished: (event) => ENDS[event.reason] ?? event.reason,
};

const ENDS = {
  stop: "it had said all",
  length: "it was as long as asked for",
  abort: "the caller stopped waiting for it",
  dropped: "likelier beams went on",
  error: "an error",
};

function found(event, story) {
  const here = event.tokens ?? (event.shared ?? 0) * (story.block_size ?? 16);
  const told = [];
  if (here) told.push(`${count(here)} of ${count(story.prompt_tokens)} tokens are on the device`);
  if (event.loading) told.push(`${places(event.loading)}: loading`);
  if (event.missed) told.push(event.missed);
  return told.join("; ") || "too short to be found";
}

export function said(event, story) {
  return SAY[event.stage]?.(event, story) ?? "";
}

const BEGINS = {
  queued: "queued",
  "taken back": "queued",
  preempted: "preempted",
  "first token": "decode",
};

/** How long it was in each stage, for the bar above the story. */
export function stages(story, now) {
  const parts = [];
  let stage = null;
  let since = 0;
  const change = (next, at) => {
    if (stage && at > since) parts.push({ stage, seconds: at - since });
    stage = next;
    since = at;
  };
  let drawn = false;
  for (const event of story.events) {
    if (event.sample) continue;
    if (event.stage === "matched" || event.stage === "resumed") change(event.loading ? "loading" : "prefill", event.at);
    else if (event.stage === "loaded") change("prefill", event.at);
    else if (event.stage === "prefill" && drawn) change("decode", event.at);
    else if (BEGINS[event.stage]) change(BEGINS[event.stage], event.at);
    drawn ||= event.stage === "first token";
  }
  change(null, story.finish_reason ? story.events[story.events.length - 1].at : Math.max(since, now));
  return parts;
}
