"""Kimi-VL by the math of its published code (modeling_kimi_vl.py, image_processing_kimi_vl.py): what ours is compared with."""
