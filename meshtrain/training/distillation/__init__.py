"""Knowledge distillation: a frozen teacher beside the model that trains."""
