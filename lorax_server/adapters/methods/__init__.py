"""The supported PEFT methods: their config fields, the validation of their tensors, and the conversion to
LoRA factors.
"""
