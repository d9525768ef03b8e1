// Numbers and times as a person reads them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return whole.format(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.5 ? 0 : value >= 9.95 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 99.5 ? value.toFixed(0) : value.toFixed(1);
}

/** A short duration: 8 ms, 1.2 s, 3 min 5 s, 2 h 10 min, 4 d 3 h. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60)
    return `${value < 9.95 && !Number.isInteger(value) ? value.toFixed(1) : value.toFixed(0)} s`;
  if (value < 3600) return pair(value, 60, "min", "s");
  if (value < 86400) return pair(value / 60, 60, "h", "min");
  return pair(value / 3600, 24, "d", "h");
}

function pair(value, per, large, small) {
  const rounded = Math.round(value);
  const rest = rounded % per;
  return `${Math.floor(rounded / per)} ${large}` + (rest ? ` ${rest} ${small}` : "");
}

export function age(at, now) {
  const passed = Math.max(0, now - at);
  return passed < 2 ? "just now" : `${seconds(Math.floor(passed))} ago`;
}

const clockFormat = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
});

export function clock(at) {
  return clockFormat.format(new Date(at * 1000));
}

export function parameters(value) {
  if (!value) return "";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} B`;
  if (value >= 1e6) return `${Math.round(value / 1e6)} M`;
  return count(value);
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
