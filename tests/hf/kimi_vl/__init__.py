"""A stand-in for the code that Kimi-VL's directory has: files of the same names, classes, modules and arguments."""
