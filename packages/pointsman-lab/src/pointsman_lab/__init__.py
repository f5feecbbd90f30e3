"""The laboratory: models, data, training, evaluation and reports. The library never imports it."""
