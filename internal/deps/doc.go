// Package deps holds the tests that keep the tree in its shape: which package may import which, what the engine
// must not use, and where testing libraries may appear. It has no code of its own.
//
// The table is in deps_test.go. Whoever adds a package adds a line there, with the reason for what it may import;
// whoever needs another arrow changes the line and its reason.
package deps
