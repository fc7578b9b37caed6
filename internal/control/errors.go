package control

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// What a daemon answers instead, as a *Error that matches one of these, on both sides.
var (
	ErrNoObject       = errors.New("no such object")
	ErrNoAttribute    = errors.New("no such attribute")
	ErrReadOnly       = errors.New("the attribute cannot be set")
	ErrValue          = errors.New("no value for the attribute")
	ErrNoVolume       = errors.New("no such volume")
	ErrNoJob          = errors.New("no job yet")
	ErrBusy           = errors.New("a job of another kind runs")
	ErrNotAttached    = errors.New("the volume has no cache, or no backing device")
	ErrExists         = errors.New("a volume of that name exists")
	ErrConnected      = errors.New("clients are connected")
	ErrUnknownRequest = errors.New("a request that is not known")
	ErrBadRequest     = errors.New("a request that makes no sense")
	ErrStarting       = errors.New("the daemon is starting")
	ErrStopping       = errors.New("the daemon is stopping")
	ErrTimeout        = errors.New("took too long")
	ErrFailed         = errors.New("failed")
)

// What can go wrong before there is an answer.
var (
	ErrNoDaemon = errors.New("no daemon answers")
	ErrInUse    = errors.New("another daemon answers there")
)

// codes are the sentinels as they go over the wire, with the HTTP status.
var codes = []struct {
	code   string
	err    error
	status int
}{
	{"no-object", ErrNoObject, 404},
	{"no-attribute", ErrNoAttribute, 404},
	{"read-only", ErrReadOnly, 403},
	{"value", ErrValue, 422},
	{"no-volume", ErrNoVolume, 404},
	{"no-job", ErrNoJob, 404},
	{"busy", ErrBusy, 409},
	{"not-attached", ErrNotAttached, 409},
	{"exists", ErrExists, 409},
	{"connected", ErrConnected, 409},
	{"unknown-request", ErrUnknownRequest, 404},
	{"bad-request", ErrBadRequest, 400},
	{"starting", ErrStarting, 503},
	{"stopping", ErrStopping, 503},
	{"timeout", ErrTimeout, 504},
	{"failed", ErrFailed, 500},
}

// An Error is a daemon's answer to a request that it did not carry out. It matches the sentinel of its code; a code
// that is not known counts as ErrFailed.
type Error struct {
	Code      string   `json:"code"`
	Message   string   `json:"message"` // a whole sentence: the other fields are in it
	Object    string   `json:"object,omitempty"`
	Attribute string   `json:"attribute,omitempty"`
	Value     string   `json:"value,omitempty"` // the wrong one
	Want      string   `json:"want,omitempty"`  // what is wanted instead
	Known     []string `json:"known,omitempty"` // what there is instead
}

func (e *Error) Error() string { return e.Message }

func (e *Error) Unwrap() error {
	for _, c := range codes {
		if c.code == e.Code {
			return c.err
		}
	}
	return ErrFailed
}

// status is the HTTP status for the answer.
func (e *Error) status() int {
	for _, c := range codes {
		if c.code == e.Code {
			return c.status
		}
	}
	return 500
}

// errorf makes an Error of a sentinel's code.
func errorf(sentinel error, format string, args ...any) *Error {
	for _, c := range codes {
		if c.err == sentinel {
			return &Error{Code: c.code, Message: fmt.Sprintf(format, args...)}
		}
	}
	return &Error{Code: "failed", Message: fmt.Sprintf(format, args...)}
}

// NoObject says that there is no such object, and which there are.
func NoObject(object string, known []string) *Error {
	e := errorf(ErrNoObject, "there is no object %q; there are: %s", object, strings.Join(known, ", "))
	e.Object, e.Known = object, known
	return e
}

// NoAttribute says that an object has no such attribute, and which it has.
func NoAttribute(object, attribute string, known []string) *Error {
	e := errorf(ErrNoAttribute, "%s has no attribute %q; it has: %s", object, attribute, strings.Join(known, ", "))
	e.Object, e.Attribute, e.Known = object, attribute, known
	return e
}

// ReadOnly says that an attribute can only be read.
func ReadOnly(object, attribute string) *Error {
	e := errorf(ErrReadOnly, "%s of %s can only be read", attribute, object)
	e.Object, e.Attribute = object, attribute
	return e
}

// BadValue says what an attribute takes instead.
func BadValue(object, attribute, value, want string) *Error {
	e := errorf(ErrValue, "%s of %s does not take %q: want %s", attribute, object, value, want)
	e.Object, e.Attribute, e.Value, e.Want = object, attribute, value, want
	return e
}

// NoVolume says that there is no such volume, and which there are.
func NoVolume(volume string, known []string) *Error {
	e := errorf(ErrNoVolume, "there is no volume %q; there are: %s", volume, strings.Join(known, ", "))
	if len(known) == 0 {
		e.Message = fmt.Sprintf("there is no volume %q, nor any other", volume)
	}
	e.Object, e.Known = volume, known
	return e
}

// NoJob says that nobody has asked for one since the daemon started.
func NoJob(volume string) *Error {
	e := errorf(ErrNoJob, "nobody has asked for a job on %s since the daemon started", volume)
	e.Object = volume
	return e
}

// Busy says which kind of job has to end before another can start.
func Busy(volume, kind string) *Error {
	e := errorf(ErrBusy, "a %s of %s is running; wait for its end, or cancel it", kind, volume)
	e.Object = volume
	return e
}

// Detached says that there is nothing to detach a volume from.
func Detached(volume string) *Error {
	e := errorf(ErrNotAttached, "%s is not attached to the cache set: it is served without a cache", volume)
	e.Object = volume
	return e
}

// FlashOnly says that a volume's data has no other place than the cache.
func FlashOnly(volume string) *Error {
	e := errorf(ErrNotAttached, "%s is a flash-only volume: it has no backing device that its data could be written back to", volume)
	e.Object = volume
	return e
}

// Exists says that a name is taken.
func Exists(volume string) *Error {
	e := errorf(ErrExists, "there is a volume %q already", volume)
	e.Object = volume
	return e
}

// BadFlash says what a flash-only volume's label or size can be instead.
func BadFlash(err error) *Error { return errorf(ErrValue, "%v", err) }

// Connected says that a volume is not taken away from its clients.
func Connected(volume string, clients int) *Error {
	e := errorf(ErrConnected, "clients are connected to %s: %d; force ends their connections", volume, clients)
	e.Object = volume
	return e
}

// Starting says that there is nothing to ask yet.
func Starting() *Error {
	return errorf(ErrStarting, "the daemon is starting: it is opening the cache set")
}

// Stopping says that nothing can be changed any more.
func Stopping() *Error {
	return errorf(ErrStopping, "the daemon is stopping: nothing can be changed any more")
}

// toError gives any error of a backend the form of an answer.
func toError(err error) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.DeadlineExceeded):
		return errorf(ErrTimeout, "not done in time: %v", err)
	}
	return errorf(ErrFailed, "%v", err)
}
