package main

import (
	"context"
	"errors"
	"fmt"
)

// Exit statuses, the same in every command.
const (
	exitDone    = 0
	exitFailed  = 1 // or errors were found
	exitUsage   = 2 // wrong usage: nothing was done
	exitRefused = 3 // refused to protect data; the message says which option overrides
	exitPartial = 4 // done in part; the message lists what was not
)

// An exitError is an error that determines the exit status. With no err the command has said all itself.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usageErrorf is for a command line that makes no sense. Formats as fmt.Errorf does, as do the others.
func usageErrorf(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// refusedErrorf is for what is not done to protect data. The text names the option that overrides.
func refusedErrorf(format string, args ...any) error {
	return &exitError{exitRefused, fmt.Errorf(format, args...)}
}

// refusedError gives err the status for a refusal.
func refusedError(err error) error { return withStatus(exitRefused, err) }

// partialErrorf is for work of which some could not be done.
func partialErrorf(format string, args ...any) error {
	return &exitError{exitPartial, fmt.Errorf(format, args...)}
}

// silentError ends a command that has said everything itself with a status.
func silentError(code int) error { return &exitError{code: code} }

func withStatus(code int, err error) error {
	if err == nil {
		return nil
	}
	return &exitError{code, err}
}

// A workError marks what a command returned from its work, in contrast to what was wrong with its command line.
type workError struct{ error }

func (e workError) Unwrap() error { return e.error }

// began marks err as coming from the work of a command.
func began(err error) error {
	if err == nil {
		return nil
	}
	return workError{err}
}

// exitStatus finds the status for err: what an exitError in it says; without one, failed if a command had begun
// to work, wrong usage if not.
func exitStatus(err error) int {
	var exit *exitError
	var work workError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &exit):
		return exit.code
	case errors.As(err, &work), errors.Is(err, context.Canceled):
		return exitFailed
	}
	return exitUsage
}
