"""The pages of docs/studies: their tables and plots, made of the records in bench/records/studies."""
