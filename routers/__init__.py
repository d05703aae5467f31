"""LBS and LPS as plain modules, their losses, the threshold search and the export format. torch and safetensors only."""
