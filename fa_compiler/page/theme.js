"use strict";
const root = document.documentElement, theme = document.getElementById("theme");
const isDark = () =>
  root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const nameTheme = () => {
  theme.textContent = isDark() ? "light" : "dark";
  theme.setAttribute("aria-label", `${theme.textContent} colours`);
};
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();

