"""Every human text: values in, `str` out. Nothing here prints, and nothing here decides."""
