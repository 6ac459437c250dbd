"""Published measurements as plans: read rows, express each as a plan and the program that ran it, compare predictions.

Anything here works on rows in the published format, wherever they come from: nothing depends on ids, files or sources.
"""
