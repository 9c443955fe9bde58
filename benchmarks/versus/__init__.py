"""Parts of the comparison with llama.cpp; cpu_vs_llamacpp.py beside this folder is the script."""
