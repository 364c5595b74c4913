"""The two sides of a run on different machines: frames between them, who is who, and what each keeps."""
