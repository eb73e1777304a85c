"""Code shared by the scripts that tests run in separate processes."""

RAISED = """
def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
"""
