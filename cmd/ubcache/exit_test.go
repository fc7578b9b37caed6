package main

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

func TestExitStatus(t *testing.T) {
	plain := errors.New("broken")
	for _, c := range []struct {
		name string
		err  error
		want int
	}{
		{"none", nil, exitDone},
		{"before the work began", plain, exitUsage},
		{"in the work", began(plain), exitFailed},
		{"wrong usage found in the work", began(usageErrorf("no %w", plain)), exitUsage},
		{"refused", began(refusedErrorf("no")), exitRefused},
		{"wrapped", began(fmt.Errorf("more: %w", withStatus(exitPartial, plain))), exitPartial},
		{"interrupted", began(context.Canceled), exitFailed},
		{"nothing more to say", began(silentError(exitFailed)), exitFailed},
	} {
		if got := exitStatus(c.err); got != c.want {
			t.Errorf("%s: status %d, want %d", c.name, got, c.want)
		}
	}
	if withStatus(exitRefused, nil) != nil || began(nil) != nil {
		t.Error("no error became one")
	}
}
