package lab

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"time"
)

// inSeconds returns v as JSON would have it, but each time.Duration in it, also of types of other packages, in seconds.
func inSeconds(v reflect.Value) any {
	switch v.Kind() {
	case reflect.Int64:
		if v.Type() == reflect.TypeFor[time.Duration]() {
			return Duration(v.Int())
		}
	case reflect.Pointer:
		if !v.IsNil() {
			return inSeconds(v.Elem())
		}
	case reflect.Slice:
		list := make([]any, v.Len())
		for i := range list {
			list[i] = inSeconds(v.Index(i))
		}
		return list
	case reflect.Struct:
		return members(nil, v)
	}
	return v.Interface()
}

// members appends those of a struct, in order, what is embedded in its place.
func members(o object, v reflect.Value) object {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		switch value := reflect.Indirect(v.Field(i)); {
		case f.Anonymous && value.Kind() == reflect.Struct:
			o = members(o, value)
		case f.IsExported() && !(strings.HasSuffix(f.Tag.Get("json"), ",omitempty") && value.IsZero()):
			o = append(o, member{f.Name, inSeconds(v.Field(i))})
		}
	}
	return o
}

// An object is one of JSON whose members have an order.
type object []member

type member struct {
	name  string
	value any
}

func (o object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		name, err := json.Marshal(m.name)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(m.value)
		if err != nil {
			return nil, err
		}
		b.Write(append(append(name, ':'), value...))
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}
