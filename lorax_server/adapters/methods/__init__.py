"""PEFT methods: config fields, tensor validation and conversion to LoRA factors."""
