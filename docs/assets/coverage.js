// Shows the rows of the coverage table that hold every word of the filter.
document.addEventListener("DOMContentLoaded", () => {
  const field = document.getElementById("coverage-filter");
  if (!field) return;
  const count = document.getElementById("coverage-count");
  const rows = [...document.querySelectorAll("#coverage tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, index) => {
      row.hidden = !words.every((word) => texts[index].includes(word));
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = `${shown} of ${rows.length}`;
  };
  field.addEventListener("input", filter);
  filter();
});
