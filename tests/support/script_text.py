"""What the scripts have in common that tests run in processes of their own."""

RAISED = """
def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
"""
