// Number formatting.

const UNITS = ["B", "kB", "MB", "GB"];

export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

export function percent(logprob) {
  if (logprob === null) return "unknown";
  const share = 100 * Math.exp(logprob);
  return share < 0.005 ? "< 0.01 %" : `${share.toFixed(2)} %`;
}

export const milliseconds = (value) => (value < 10_000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);

export const rate = (value) => (value < 100 ? value.toFixed(1) : String(Math.round(value)));

export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
