"""Pieces for other training libraries; each file needs the library it is named after."""
