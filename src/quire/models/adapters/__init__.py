"""LoRA adapters: folders of `peft`, read and checked against the model that they adapt."""
