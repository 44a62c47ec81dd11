from helpers.sandbox import run_figures, sandbox

__all__ = ["run_figures", "sandbox"]
