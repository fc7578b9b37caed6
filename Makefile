# "make help" lists the targets. A checkout, Go, gcc, make and (to install what tests call) root are all it takes.
#
# Build tags: invariants compiles checks in, purego leaves assembly out, interop is for tests with real kernels.

GO          ?= go
# programs are static, and only the race detector needs a C compiler
CGO_ENABLED ?= 0
export GO CGO_ENABLED
FUZZTIME    ?= 5m
BENCHTIME   ?= 1s
# kernels that "make interop" boots
KERNELS     ?= 6.1 6.12
# how often each power cut is tried there
ROUNDS      ?= 1
# how often a set goes from a kernel to us and back there
TURNS       ?= 2
# packages whose goroutines meet: these run under the race detector in "make test" too
RACE        ?= $(wildcard . ./internal/rt ./internal/uring ./internal/blockdev ./internal/cacheset ./internal/volume ./internal/nbd \
               ./internal/offline ./internal/control)

stage       := scripts/stage
links       := bin/make-bcache bin/bcache-super-show

.PHONY: all build demo test lint unit modules race race-short long soak bench fuzz interop interop-long clean help tools bin/ubcache
.NOTPARALLEL:

all: build ## the same as build

build: bin/ubcache $(links) ## the static program and its links, in bin/

bin/ubcache:
	$(GO) build -o $@ ./cmd/ubcache

$(links): bin/ubcache
	ln -sf ubcache $@

demo: build ## what a cache gains, before your eyes, in half a minute
	bin/ubcache demo

test: ## what every change must pass, in twelve minutes: lint, and tests without and with the race detector
	@$(stage) "tools for tests" scripts/with-tools true
	@$(stage) "go modules" scripts/retry 3 $(MAKE) --no-print-directory modules
	@$(stage) build $(MAKE) --no-print-directory build
	@$(stage) lint $(MAKE) --no-print-directory lint
	@$(stage) tests $(MAKE) --no-print-directory unit
	@$(stage) "tests with the race detector" $(MAKE) --no-print-directory race-short

tools: ## install the programs that tests call (as root)
	scripts/install-tools

modules:
	@$(GO) mod download
	@$(GO) mod download -modfile=tools/go.mod

lint: ## format, vet, staticcheck, imports
	@scripts/lint

unit: build ## tests, without the race detector
	@scripts/with-tools $(GO) test -count=1 -timeout 15m ./...

# In simulation one goroutine runs at a time, handed on by locks: there the race detector sees nothing, and takes minutes.
race-short: ## the race detector over the packages whose goroutines meet, their short tests
	@CGO_ENABLED=1 scripts/with-tools $(GO) test -count=1 -timeout 15m -race -short -tags invariants \
		-skip 'PowerCuts|TestKills|TestLivesInARow|TestReadsWhileRunning|TestStartsInARow' $(RACE)

long: ## every cut of the crash loops, and more seeds of the loads that run to their end: an hour or so
	@UBCACHE_EVERY_CUT=1 scripts/with-tools $(GO) test -count=1 -timeout 4h -run 'PowerCuts|TestKills|TestLivesInARow|TestStartsInARow' -v .
	@UBCACHE_LONG=1 UBCACHE_MINUTES=15 scripts/with-tools $(GO) test -count=1 -timeout 2h -run 'TestCollections|TestHours|TestMinutes' -v .
	@UBCACHE_SIM="seeds=0-199" scripts/with-tools $(GO) test -count=1 -timeout 2h -run 'TestReadsWhileRunning|TestLivesInARow' .

soak: ## crash loops with ever new seeds until interrupted; what was done adds up in build/soak.log
	@scripts/soak

race: ## the race detector over everything
	@CGO_ENABLED=1 scripts/with-tools $(GO) test -count=1 -timeout 60m -race -tags invariants ./...

bench: build ## all benchmarks, and the comparisons in bench/
	@scripts/with-tools $(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) ./...
	@for script in bench/*.sh; do echo "== $$script"; scripts/with-tools $$script || exit 1; done

fuzz: ## each fuzz target for FUZZTIME (5m); keeps what it found in testdata/fuzz
	@FUZZTIME=$(FUZZTIME) scripts/fuzz

interop: build ## with the real kernels KERNELS (6.1 6.12) in virtual machines (as root)
	@$(stage) "virtual machines" scripts/retry 3 interop/vm/setup $(KERNELS)
	@UBCACHE_KERNELS="$(KERNELS)" UBCACHE_ROUNDS=$(ROUNDS) UBCACHE_TURNS=$(TURNS) $(stage) "real kernels" scripts/with-tools \
		$(GO) test -tags interop -count=1 -timeout $(if $(filter 1,$(ROUNDS)),25m,3h) -v ./interop

interop-long: ## interop with 7.2 too, three rounds of power cuts, and ten turns of a set between kernel and us
	@$(MAKE) --no-print-directory interop KERNELS="6.1 6.12 7.2" ROUNDS=3 TURNS=10

clean: ## remove what was built
	rm -rf bin build

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' Makefile
