package offline

import (
	"fmt"
	"sync"
)

// A Severity says what a finding means for whoever owns the data.
type Severity uint8

// Severities, from the least.
const (
	// Harmless: the kernel and we leave it behind in normal operation, a crash included. Nothing needs doing.
	Harmless Severity = iota
	// Degraded: no data is lost, but something works less well, or a kernel may refuse the set until repaired.
	Degraded
	// AtRisk: some data may be lost or cannot be told from older data; the places are named. The rest reads.
	AtRisk
	// Fatal: the set cannot be opened, not even for reading.
	Fatal
)

var severityNames = [...]string{"harmless", "degraded", "data at risk", "fatal"}

func (s Severity) String() string { return severityNames[s] }

// MarshalText makes a Severity a string in JSON.
func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// A Code names a kind of finding. Codes are stable: scripts may rely on them. docs/check.md explains each.
type Code string

// Kinds of findings.
const (
	SuperUnreadable Code = "super-unreadable"
	SuperRefused    Code = "super-refused"
	SuperLimited    Code = "super-limited"
	SuperFeature    Code = "super-feature"
	SuperNoSync     Code = "super-no-sync"

	JournalUnreadable Code = "journal-unreadable"
	JournalEmpty      Code = "journal-empty"
	JournalTorn       Code = "journal-torn"
	JournalDamaged    Code = "journal-damaged"
	JournalGap        Code = "journal-gap"
	JournalDiscarded  Code = "journal-discarded"
	JournalOrder      Code = "journal-order"
	JournalKey        Code = "journal-key"

	PrioUnreadable Code = "prio-unreadable"
	PrioDamaged    Code = "prio-damaged"
	PrioChain      Code = "prio-chain"

	UUIDPointer    Code = "uuid-pointer"
	UUIDUnreadable Code = "uuid-unreadable"
	UUIDDuplicate  Code = "uuid-duplicate"
	UUIDOld        Code = "uuid-old-format"

	RootPointer    Code = "root-pointer"
	RootUnreadable Code = "root-unreadable"
	RootDamaged    Code = "root-damaged"
	NodeUnreadable Code = "node-unreadable"
	NodeDamaged    Code = "node-damaged"
	NodeTorn       Code = "node-torn"
	NodeChild      Code = "node-child"
	NodeCoverage   Code = "node-coverage"
	NodeOrder      Code = "node-order"
	NodeBounds     Code = "node-bounds"
	NodeOverfull   Code = "node-overfull"

	KeyBad        Code = "key-bad"
	KeyTooStale   Code = "key-too-stale"
	KeyStale      Code = "key-stale"
	KeyStaleDirty Code = "key-stale-dirty"
	KeyCheck      Code = "key-check"
	KeyManyPtrs   Code = "key-many-pointers"

	BucketTwoRoles Code = "bucket-two-roles"
	BucketShared   Code = "bucket-shared"
	BucketGenAhead Code = "bucket-gen-ahead"
	BucketFew      Code = "bucket-few-unused"
	BucketHeadroom Code = "bucket-headroom"

	SlotUnknownDirty Code = "slot-unknown-dirty"
	SlotUnknown      Code = "slot-unknown"
	SlotRetired      Code = "slot-retired-keys"
	SlotRetiredDirty Code = "slot-retired-dirty"

	BackingAbsent     Code = "backing-absent"
	BackingUnreadable Code = "backing-unreadable"
	BackingRefused    Code = "backing-refused"
	BackingLimited    Code = "backing-limited"
	BackingForeign    Code = "backing-foreign"
	BackingDetached   Code = "backing-detached"
	BackingNoSlot     Code = "backing-no-slot"
	BackingLost       Code = "backing-lost-cache"
	BackingBlock      Code = "backing-block-size"
	DirtyUnderClean   Code = "dirty-under-clean"
	DirtyVoid         Code = "dirty-void"
	DirtyBeyondEnd    Code = "dirty-beyond-end"
	KeyBeyondEnd      Code = "key-beyond-end"

	DataDirty Code = "data-unreadable-dirty"
	DataClean Code = "data-unreadable-clean"
)

// An explanation is what docs/check.md says of a code.
type explanation struct {
	severity Severity
	text     string
}

var codes = map[Code]explanation{
	SuperUnreadable: {Fatal, "The superblock of the cache device cannot be read."},
	SuperRefused:    {Fatal, "The superblock of the cache device breaks a rule of acceptance, which is named."},
	SuperLimited:    {Degraded, "The superblock allows less than reading and writing: a read-only-compatible feature that is not known, the obsolete large-bucket layout, several cache devices, or a journal too short to advance."},
	SuperFeature:    {Harmless, "A compatible feature bit that is not known is set. It is kept."},
	SuperNoSync:     {Harmless, "The cache device was formatted and never used; whatever it holds is void."},

	JournalUnreadable: {AtRisk, "A piece of the journal cannot be read. Where a needed entry is missing, or one newer than the newest could lie there, it is a journal-gap as well."},
	JournalEmpty:      {Fatal, "The set has been used and no journal entry can be found."},
	JournalTorn:       {Harmless, "An entry of the journal is not whole: a power cut during a journal write leaves that. Such an entry was never acknowledged, unless its bytes went bad later, which cannot be told apart where it is the newest. Where it is not, it is a journal-gap as well."},
	JournalDamaged:    {AtRisk, "A journal entry has a right checksum and breaks the format, or is right but for its magic number; the second still counts here, and a kernel does not see it."},
	JournalGap:        {Fatal, "Entries that must be replayed are missing or cannot be used, or could lie where nothing can be read; their numbers are named."},
	JournalDiscarded:  {Harmless, "Entries at the beginning of the needed range are missing on a device that discards freed buckets. Kernels up to 6.12 leave and accept that."},
	JournalOrder:      {AtRisk, "Needed entries do not follow one another around the ring; a kernel's search may miss the newest."},
	JournalKey:        {AtRisk, "A journal entry holds a key that a kernel cannot replay."},

	PrioUnreadable: {Fatal, "A prio set cannot be read, so that generations are not known."},
	PrioDamaged:    {Fatal, "A prio set has a wrong checksum or magic number."},
	PrioChain:      {Fatal, "The chain of prio sets leaves the device or comes back to itself."},

	UUIDPointer:    {Fatal, "The journal's pointer to the uuid array breaks the format."},
	UUIDUnreadable: {Fatal, "The uuid array cannot be read, so that nobody knows whose the extents are."},
	UUIDDuplicate:  {AtRisk, "Two slots have the same uuid."},
	UUIDOld:        {Harmless, "The uuid array has the old form with entries of 64 bytes."},

	RootPointer:    {Fatal, "The journal's pointer to the root of the tree breaks the format."},
	RootUnreadable: {Fatal, "The root of the tree cannot be read."},
	RootDamaged:    {Fatal, "The root of the tree is damaged, and the journal does not make up for it."},
	NodeUnreadable: {AtRisk, "A node of the tree cannot be read. What is cached in its range is not known; reading there is an error, except where the journal has newer keys."},
	NodeDamaged:    {AtRisk, "A node of the tree is damaged. As node-unreadable."},
	NodeTorn:       {Degraded, "The last set of a leaf is not whole, and every key in it is still in the journal: a power cut during the append. Nothing is lost. A kernel refuses the set until the node is rewritten."},
	NodeChild:      {AtRisk, "A key of an interior node breaks the format."},
	NodeCoverage:   {AtRisk, "The children of an interior node do not cover its range."},
	NodeOrder:      {AtRisk, "The keys within one set of a node are not in order, or overlap in a leaf."},
	NodeBounds:     {AtRisk, "A node has a key outside of its range."},
	NodeOverfull:   {Degraded, "The merged keys of a node need more room than the blocks written so far have. A kernel that reads it overwrites its memory."},

	KeyBad:        {AtRisk, "An extent breaks the format: larger than its position, outside of its bucket or of the device, or of a slot that cannot exist. Reading there is an error."},
	KeyTooStale:   {AtRisk, "A pointer is more than 96 generations behind its bucket. A kernel refuses the set, and older pointers could look valid again."},
	KeyStale:      {Harmless, "Extents whose buckets have been reused since. They hide what is older and hold no data."},
	KeyStaleDirty: {Harmless, "As key-stale, with the dirty bit: the data was written back or overwritten before the bucket was reused. The kernel prints a message for them and goes on."},
	KeyCheck:      {Harmless, "Placeholders of read misses that were never filled."},
	KeyManyPtrs:   {Degraded, "Extents with more than one pointer, which no kernel makes; the first counts."},

	BucketTwoRoles: {AtRisk, "A bucket is used for two things at once."},
	BucketShared:   {AtRisk, "Two live extents lie on the same sectors of the cache device."},
	BucketGenAhead: {Harmless, "Pointers are newer than the generation in the prio sets: buckets that were put to use since these were written."},
	BucketFew:      {Degraded, "Fewer unused buckets than one write of the prio sets needs: a kernel hangs when it activates the set."},
	BucketHeadroom: {Harmless, "Few unused buckets: a kernel that must split many nodes during replay could hang."},

	SlotUnknownDirty: {AtRisk, "Dirty extents of a slot that was never used: nobody knows where the data belongs."},
	SlotUnknown:      {Degraded, "Clean extents of a slot that was never used."},
	SlotRetired:      {Harmless, "Clean extents of a device that was detached or a volume that was deleted."},
	SlotRetiredDirty: {Harmless, "Dirty extents of a device that was detached or a volume that was deleted. They take up room until they are removed."},

	BackingAbsent:     {Harmless, "A backing device of the set was not given, so that what concerns both was not checked. Its dirty bytes are named: without the cache the device is not complete."},
	BackingUnreadable: {AtRisk, "The superblock of a backing device cannot be read."},
	BackingRefused:    {AtRisk, "The superblock of a backing device breaks a rule of acceptance, which is named."},
	BackingLimited:    {Degraded, "The superblock of a backing device allows no more than reading."},
	BackingForeign:    {Degraded, "A backing device that was given belongs to another set."},
	BackingDetached:   {Harmless, "A backing device that was given is not attached to any set, or was used without its cache since."},
	BackingNoSlot:     {Harmless, "A clean backing device names the set, and the set does not know it: the attach was cut off. It will attach as a new one."},
	BackingLost:       {AtRisk, "A backing device has unflushed data in a set that has no slot for it, or was formatted since."},
	BackingBlock:      {Degraded, "The block of a backing device is smaller than that of the set; a kernel refuses to attach it."},
	DirtyUnderClean:   {Harmless, "The cache holds dirty extents of a backing device whose state says clean. They count: the kernel writes the state without waiting for the disk."},
	DirtyVoid:         {Harmless, "The cache holds dirty extents of a backing device that was detached from it, or used without it. They are void."},
	DirtyBeyondEnd:    {AtRisk, "Dirty extents beyond the end of the backing device or volume: there is no place for the data."},
	KeyBeyondEnd:      {Harmless, "Clean extents beyond the end of the backing device or volume."},

	DataDirty: {AtRisk, "The only copy of some data cannot be read from the cache device."},
	DataClean: {Degraded, "A clean copy cannot be read from the cache device. The backing device should have the data, and will have lost it only if its own write was lost in a power cut; reading there is an error."},
}

// Severity returns what findings of this code mean.
func (c Code) Severity() Severity { return codes[c].severity }

// Explain returns a sentence or two about the code, as in docs/check.md.
func (c Code) Explain() string { return codes[c].text }

// A Finding is one thing that a check found.
type Finding struct {
	Code     Code     `json:"code"`
	Severity Severity `json:"severity"`
	Device   string   `json:"device,omitempty"`
	Sector   int64    `json:"sector"`  // where on Device, -1 where it has no one place
	Sectors  int64    `json:"sectors"` // how far the thing found fault with reaches
	Count    int64    `json:"count"`   // how many there are, Sector being the first
	Message  string   `json:"message"`
}

// String returns one line: severity, code, place and message.
func (f *Finding) String() string {
	s := f.Severity.String() + ": " + string(f.Code) + ": "
	if f.Device != "" {
		s += f.Device + ": "
	}
	if f.Sector >= 0 {
		s += fmt.Sprintf("sector %d: ", f.Sector)
	}
	s += f.Message
	if f.Count > 1 {
		s += fmt.Sprintf(" (%d of them, this is the first)", f.Count)
	}
	return s
}

// findingsPerCode is how many findings of one code are kept; more are counted on the last of them. It bounds
// memory on a disk that is all garbage.
const findingsPerCode = 200

// A Report collects findings. Its methods may be called at the same time.
type Report struct {
	mu       sync.Mutex
	findings []Finding
	perCode  map[Code][]int // indices into findings
}

// add records a finding at a place.
func (r *Report) add(code Code, device string, sector, sectors int64, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.perCode == nil {
		r.perCode = make(map[Code][]int)
	}
	at := r.perCode[code]
	if len(at) >= findingsPerCode {
		r.findings[at[len(at)-1]].Count++
		return
	}
	r.perCode[code] = append(at, len(r.findings))
	r.findings = append(r.findings, Finding{
		Code: code, Severity: code.Severity(), Device: device, Sector: sector, Sectors: sectors, Count: 1, Message: fmt.Sprintf(format, args...),
	})
}

// tally records that there is one more of something that comes in large numbers; the first is described.
func (r *Report) tally(code Code, device string, sector, sectors int64, format string, args ...any) {
	r.mu.Lock()
	if at := r.perCode[code]; len(at) > 0 {
		r.findings[at[0]].Count++
		r.mu.Unlock()
		return
	}
	r.mu.Unlock()
	r.add(code, device, sector, sectors, format, args...)
}

// Findings returns what was found so far, in the order in which it was found.
func (r *Report) Findings() []Finding {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Finding(nil), r.findings...)
}

// Worst returns the greatest severity found; found is false where there is nothing at all.
func (r *Report) Worst() (worst Severity, found bool) {
	for _, f := range r.Findings() {
		worst, found = max(worst, f.Severity), true
	}
	return worst, found
}

// first returns the first finding of that severity or a greater one.
func (r *Report) first(s Severity) *Finding {
	for _, f := range r.Findings() {
		if f.Severity >= s {
			return &f
		}
	}
	return nil
}
