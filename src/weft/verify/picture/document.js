// The reader's choice of paper, until the page is closed.
document.querySelector("#theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark" ||
    (root.style.colorScheme === "" && matchMedia("(prefers-color-scheme: dark)").matches);
  root.style.colorScheme = dark ? "light" : "dark";
});
