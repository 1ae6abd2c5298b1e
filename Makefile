.DEFAULT_GOAL := help
.PHONY: help install test quick smoke lint types imports format ci

help: ## This list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: ## Everything needed to work on the project
	pip install -e ".[dev]"

test: ## All tests (real model included)
	python -m pytest

quick: ## Tests without real models
	python -m pytest -m "not slow"

smoke: ## The whole main job at its smallest
	python -m pipeline experiment=smoke stage=all

lint: ## ruff, import contracts, types
	ruff check . && ruff format --check . && lint-imports && mypy

format: ## Let ruff tidy up
	ruff check --fix . && ruff format .

ci: ## What CI runs
	bash .ci/run
