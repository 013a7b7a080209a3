"""The report's shell (jinja2, css), its cell template for nbconvert, and what makes notebooks self-contained."""
