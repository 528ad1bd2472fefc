"""`stagerun lsp`: a language server. `server` talks to the editor; what it answers comes from the other modules, which know no protocol."""
