// Sets the chosen colours before anything is drawn. The others of the page are modules, which run later.

const THEME = "allspan-theme";

try {
  const chosen = localStorage.getItem(THEME);
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // the browser keeps nothing for this page: its own preference holds
}
