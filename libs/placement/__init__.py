"""Which part of a model instance lives on which worker: values that engine, coordinator and gateway share."""
