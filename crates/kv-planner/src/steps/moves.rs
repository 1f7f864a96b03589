//! Owns which cache slots are copied after a verify step, so that accepted tokens lie
//! one behind the other. It does not own the copy.

use super::{length, refuse};
use crate::address;
use crate::error::Result;

/// Slots to copy, in this order; no source is overwritten before it is read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Moves {
    /// Slots to read.
    pub source: Vec<i64>,
    /// Slots to write.
    pub destination: Vec<i64>,
    /// Position of the last accepted token of each row in the step's flat token list; -1
    /// where the row accepted none.
    pub last: Vec<i64>,
}

/// Moves of accepted tokens to the front of their row's slots.
///
/// `accept_index` has `columns` entries a row: positions in the flat list of all rows'
/// `width` tokens, ascending, then -1. `slots` are the cache slots of that list. Both
/// strides are given, because a tree of many drafts has more tokens than a path steps.
pub fn accepted_moves(accept_index: &[i64], columns: u64, slots: &[i64], width: u64) -> Result<Moves> {
    if columns == 0 || width < columns {
        let why = "a row would accept more tokens than it has";
        return Err(refuse(
            "columns",
            columns,
            width,
            why,
            "give the steps of a path + 1, at most the tokens of a row",
        ));
    }
    if !(accept_index.len() as u64).is_multiple_of(columns) {
        let why = "the last row would be cut";
        return Err(refuse("accept_index", accept_index.len(), columns, why, "give whole rows"));
    }
    let rows = accept_index.len() as u64 / columns;
    let tokens = address::product(&[rows, width])?;
    if slots.len() as u64 != tokens {
        let why = "rows and slots would be paired wrongly";
        return Err(refuse("slots", slots.len(), tokens, why, "give a slot for every token of every row"));
    }
    let mut moves = Moves::default();
    for (row, accepted) in accept_index.chunks_exact(columns as usize).enumerate() {
        let first = row as i64 * width as i64;
        let mut last = -1;
        let mut ended = false;
        for (step, position) in accepted.iter().enumerate() {
            let subject = || format!("accept_index[{row}, {step}]");
            if *position == -1 {
                ended = true;
                continue;
            }
            let inside = (first..first + width as i64).contains(position);
            if ended || !inside || *position <= last {
                let remedy = "give ascending positions of the row's own tokens, then -1";
                return Err(refuse(subject(), *position, last, "a token would be copied from another place", remedy));
            }
            let (from, to) = (slots[*position as usize], slots[(first + step as i64) as usize]);
            length("slots", *position as usize, from.min(to))?;
            if from != to {
                moves.source.push(from);
                moves.destination.push(to);
            }
            last = *position;
        }
        moves.last.push(last);
    }
    Ok(moves)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn accepted_tokens_move_to_the_front_of_their_row() {
        let slots: Vec<i64> = (100..116).collect();
        let moves = accepted_moves(&[0, 3, 5, -1, 8, -1, -1, -1], 4, &slots, 8).unwrap();
        assert_eq!((moves.source, moves.destination), (vec![103, 105], vec![101, 102]));
        assert_eq!(moves.last, [5, 8]);
        let none = accepted_moves(&[-1, -1], 2, &[7, 8, 9], 3).unwrap();
        assert_eq!((none.last, none.source.len()), (vec![-1], 0));
        assert_eq!(accepted_moves(&[], 2, &[], 3).unwrap(), Moves::default());
    }

    #[test]
    fn strange_indices_are_refused() {
        let slots: Vec<i64> = (1..9).collect();
        for accept in [[0, 0], [1, 0], [4, 5], [-1, 0], [-2, 0], [0, 8], [9, 10]] {
            let index = [accept[0], accept[1], 4, -1];
            assert_eq!(accepted_moves(&index, 2, &slots, 4).unwrap_err().kind, ErrorKind::LengthError, "{accept:?}");
        }
        for (columns, slots, width) in [(0, 8, 4), (5, 8, 4), (3, 8, 4), (2, 7, 4), (2, 9, 4)] {
            let slots: Vec<i64> = (0..slots).collect();
            assert_eq!(
                accepted_moves(&[0, 1, 4, -1], columns, &slots, width).unwrap_err().kind,
                ErrorKind::LengthError
            );
        }
        assert_eq!(accepted_moves(&[1, -1], 2, &[-3, 4], 2).unwrap_err().kind, ErrorKind::LengthError);
    }
}
