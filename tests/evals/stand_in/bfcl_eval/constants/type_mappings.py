GORILLA_TO_OPENAPI = {
    "string": "string", "integer": "integer", "float": "number", "list": "array", "dict": "object", "any": "string",
}  # fmt: skip
