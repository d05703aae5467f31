"""LBS and LPS as plain modules, their losses, the threshold search and the export format.

Imports torch and safetensors only.
"""
