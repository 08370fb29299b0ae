// Colours as numbers, for canvases: those of the style sheet, and one for each request.

const probe = document.createElement("i");
probe.hidden = true;
document.documentElement.append(probe);

/** A colour of the style sheet, as it is now, in light or dark: [r, g, b]. */
export function named(name) {
  probe.style.color = `var(--${name})`;
  const parts = getComputedStyle(probe).color.match(/[\d.]+/g);
  return parts.slice(0, 3).map(Number);
}

export const css = ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`;

export function mix(a, b, share) {
  return a.map((value, i) => value + (b[i] - value) * share);
}

/** OKLCH to sRGB: equal lightness looks equal, whatever the hue. */
function oklch(lightness, chroma, hue) {
  const angle = (hue * Math.PI) / 180;
  const a = chroma * Math.cos(angle);
  const b = chroma * Math.sin(angle);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((value) => {
    const bounded = Math.min(1, Math.max(0, value));
    const bent = bounded <= 0.0031308 ? 12.92 * bounded : 1.055 * bounded ** (1 / 2.4) - 0.055;
    return Math.round(bent * 255);
  });
}

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark"
  || (document.documentElement.dataset.theme === undefined
    && matchMedia("(prefers-color-scheme: dark)").matches);

/** Neighbours in time differ clearly; none comes near the gold of what is shared. */
export function ofRequest(number) {
  const hue = 165 + ((number * 83) % 185);
  return oklch(isDark() ? 0.69 : 0.63, 0.105, hue);
}

/** Gold, deeper the more hold the block. */
export function ofShared(holders) {
  const share = Math.min(1, Math.log2(holders - 1) / 5 || 0);
  const lightness = isDark() ? 0.8 - 0.13 * share : 0.79 - 0.17 * share;
  return oklch(lightness, 0.125 + 0.015 * share, 82 - 32 * share);
}

const listeners = [];
/** Called when light turns into dark, or back. */
export function onChange(listener) {
  listeners.push(listener);
}
export function changed() {
  for (const listener of listeners) listener();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
