UNSIGNED: object
