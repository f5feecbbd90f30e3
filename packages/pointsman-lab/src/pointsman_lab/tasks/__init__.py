"""One folder a task: data, model, objective, metrics, evaluation, tables, sections of the page, presets, flags."""
