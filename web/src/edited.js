// The text of a field that shows a value until somebody types, and again once that value is another.
import { useState } from "preact/hooks";

// In an effect it would be set behind the picture: what is typed at once would be lost.
export function useEdited(value) {
  const [edit, setEdit] = useState({ of: value, text: value });
  return [edit.of === value ? edit.text : value, (text) => setEdit({ of: value, text })];
}
